"""Results of training rounds in Python: score them, set them side by side, look published ones up.

    from timetrial import results

    for result in results.score("training_results_v5.0/NVIDIA"):
        print(result.benchmark, result.score_min, result.verdict)
    ours, theirs = *results.score("my/llama31_8b"), results.one("published:v5.1/AMD/llama31_8b")
    print(results.compare([theirs, ours]).pairs[0].per_accelerator)

Names are loaded when they are first used: importing this package costs nothing, also for those that want a part of it.
Four of them, `score`, `compare`, `published` and `explain`, are also names of modules here. The functions are what
this package has under these names; the modules are imported from as ever (`from timetrial.results.compare import ...`).
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timetrial.results.api import score as score
    from timetrial.results.compare import Comparison as Comparison
    from timetrial.results.compare import Pair as Pair
    from timetrial.results.compare import compare as compare
    from timetrial.results.compare import scaling_table as scaling_table
    from timetrial.results.explain import explain as explain
    from timetrial.results.many import score_all as score_all
    from timetrial.results.published import one as one
    from timetrial.results.published import published as published
    from timetrial.results.records import Convergence as Convergence
    from timetrial.results.records import Energy as Energy
    from timetrial.results.records import Figures as Figures
    from timetrial.results.records import Finding as Finding
    from timetrial.results.records import Result as Result
    from timetrial.results.records import Run as Run
    from timetrial.results.records import RunTime as RunTime

_HOMES = {
    "score": "api",
    "score_all": "many",
    **dict.fromkeys(("Comparison", "Pair", "compare", "scaling_table"), "compare"),
    "explain": "explain",
    **dict.fromkeys(("one", "published"), "published"),
    **dict.fromkeys(("Convergence", "Energy", "Figures", "Finding", "Result", "Run", "RunTime"), "records"),
}
"""Public name -> the module that has it."""

__all__ = sorted(_HOMES)


def _load(name: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(types.ModuleType):
    """Keeps the functions under the names that they share with modules: an import would put the module there."""


def _kept(name: str) -> property:
    return property(lambda _: _load(name), lambda _, module: None)


for _name in ("score", "compare", "published", "explain"):
    setattr(_Package, _name, _kept(_name))
sys.modules[__name__].__class__ = _Package
