"""Results of training rounds in Python: score them, set them side by side, look published ones up.

    from timetrial import results

    for result in results.score("training_results_v5.0/NVIDIA"):
        print(result.benchmark, result.score_min, result.verdict)
    ours, theirs = *results.score("my/llama31_8b"), results.one("published:v5.1/AMD/llama31_8b")
    print(results.compare([theirs, ours]).pairs[0].per_accelerator)

Names are loaded when they are first used: importing this package costs nothing, also for those that want a part of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timetrial.results.api import score as score
    from timetrial.results.breakdown import explain as explain
    from timetrial.results.comparison import Comparison as Comparison
    from timetrial.results.comparison import Pair as Pair
    from timetrial.results.comparison import compare as compare
    from timetrial.results.comparison import scaling_table as scaling_table
    from timetrial.results.lookup import one as one
    from timetrial.results.lookup import published as published
    from timetrial.results.many import score_all as score_all
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
    **dict.fromkeys(("Comparison", "Pair", "compare", "scaling_table"), "comparison"),
    "explain": "breakdown",
    **dict.fromkeys(("one", "published"), "lookup"),
    **dict.fromkeys(("Convergence", "Energy", "Figures", "Finding", "Result", "Run", "RunTime"), "records"),
}
"""Public name -> the module that has it."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
