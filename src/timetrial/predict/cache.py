"""Traces kept between predictions, which should not wait seconds for torch and for what was traced before.

They lie in the user's cache directory, one file for the layers of a mapping, under a key of everything that
decides them: model, adapters, sequence length, the part of the plan that a layer sees, the kind of device,
torch's version and the source that a trace runs. A file that is damaged is made anew; a cache that cannot be
written costs time, never a prediction.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import timetrial
from timetrial.cachedir import root
from timetrial.config import Data, Evaluation, Optim, Plan, RunConfig, replace
from timetrial.config import dumps as dumps_config
from timetrial.predict.events import LayerTrace, dumps, loads

SOURCES = ("config.py", "models/**/*.py", "parallel/*.py", "precision/*.py", "predict/events.py", "predict/trace*.py")
"""What a trace runs, inside the package."""
IN_MEMORY = 256
"""Mappings that a process keeps; each some hundred kilobytes."""


def layers(config: RunConfig, kind: str = "cuda") -> dict[str, LayerTrace]:
    """`trace.trace_layers(config, kind)`, or what it returned before; torch is imported only where it did not.

    Raises UserError, with the reason, on a mapping that cannot be traced.
    """
    return dict(_layers(essence(config), kind, root() / "traces"))


def essence(config: RunConfig) -> RunConfig:
    """`config` with all left out that its traces do not depend on: the same for plans that differ in dp alone."""
    plan = config.plan
    return RunConfig(
        workload=config.workload,
        preset="",
        round="",
        model=replace(config.model, n_layers=1),
        data=Data("", seq_len=config.data.seq_len),
        optim=Optim(),
        evaluation=Evaluation("", 0.0, 1, 1),
        plan=Plan(
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep,
            pp=2 if plan.pp > 1 and plan.tp == 1 else 1,  # there, a pipeline has another loss
            mbs=plan.mbs,
            precision=plan.precision,
            recompute=plan.recompute,
        ),
        lora=config.lora,
    )


@functools.lru_cache(IN_MEMORY)
def _layers(config: RunConfig, kind: str, directory: Path) -> dict[str, LayerTrace]:
    key = hashlib.sha256("\n".join((dumps_config(config), kind, *_software())).encode()).hexdigest()
    path = directory / f"{config.workload}-{key[:24]}.jsonl"
    found = _read(path)
    if found is None:
        from timetrial.predict.trace import trace_layers

        found = trace_layers(config, kind)
        with contextlib.suppress(OSError):
            _write(path, found)
    return found


@functools.cache
def _software() -> tuple[str, str]:
    """Torch's version and a hash of the files of SOURCES, as they are when this process first asks."""
    package = Path(timetrial.__path__[0])
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in package.glob(pattern)):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return importlib.metadata.version("torch"), digest.hexdigest()


def _read(path: Path) -> dict[str, LayerTrace] | None:
    """What `_write` wrote; None where there is nothing or it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    checksum, _, lines = text.partition("\n")
    if checksum != hashlib.sha256(lines.encode()).hexdigest():
        return None
    return {trace.kind: trace for trace in map(loads, lines.splitlines())}


def _write(path: Path, traces: dict[str, LayerTrace]) -> None:
    """A checksum, then a line for each layer. Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{dumps(trace)}\n" for trace in traces.values())
    handle, partial = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}")
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
