"""Fit the constants anew and write what the package keeps: the constants, and every validated run's errors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from timetrial.errors import UserError
from timetrial.predict import fit, sure, validate
from timetrial.predict.constants import Constants
from timetrial.predict.constants import load as load_constants
from timetrial.predict.sure import Validated
from timetrial.predict.validate import Published

Say = Callable[[str], None]

GROUPS: Mapping[str, Callable[[Validated], str]] = {
    "system": lambda v: v.system,
    "model": lambda v: v.model,
    "precision": lambda v: v.precision,
    "stack": lambda v: v.stack,
    "accelerators": lambda v: _size(v.accelerators),
}
"""By what errors are told."""


def bundled() -> Path:
    """The published step times that the package has."""
    return Path(str(resources.files("timetrial.predict") / "data" / "step_times.csv"))


def read(paths: Iterable[str | Path]) -> tuple[list[Published], list[str]]:
    """`validate.read`, with one line for a file that cannot be."""
    try:
        return validate.read(paths)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--rows: {error}") from None


def run(runs: Sequence[Published], say: Say) -> tuple[Constants, list[Validated]]:
    """Constants fitted to all runs, and each run's errors: under them, and under those without its system."""
    points = validate.points(runs)
    names = fit.names(points)
    basis = (
        f"{len(runs)} published step times of {len(points)} configurations on {len({p.system for p in points})} systems"
    )
    say(f"fitting {len(names)} constants to {basis}")
    whole = fit.fit(points, names, basis)
    say("leaving out one system after another")
    without = fit.left_out(points, names, whole, say)
    found = []
    for one in runs:
        constants = without[one.system.name]
        found.append(record(one, one.step(constants).seconds, one.step(whole).seconds))
    return whole, found


def record(one: Published, without_s: float, fitted_s: float) -> Validated:
    """A run with its two predictions."""
    q, p = one.request, one.request.plan
    degrees = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "vp": p.vp, "dp": p.dp, "mbs": p.mbs, "gbs": p.gbs}
    return Validated(
        source=one.source,
        model=q.model,
        system=one.system.name,
        generation=one.system.accelerator.generation,
        stack=one.stack.name,
        precision=q.precision,
        accelerators=q.accelerators,
        mapping=" ".join(f"{k}{v}" for k, v in degrees.items() if v > 1 or k in ("mbs", "gbs")),
        published_s=one.seconds,
        error=without_s / one.seconds - 1,
        fitted_error=fitted_s / one.seconds - 1,
    )


def checked(runs: Sequence[Published]) -> list[Validated]:
    """Each run's error under the package's constants, which were fitted to what the package has, not to these."""
    constants = load_constants()
    seconds = [one.step(constants).seconds for one in runs]
    return [record(one, found, found) for one, found in zip(runs, seconds, strict=True)]


def as_json(runs: Sequence[Validated]) -> dict[str, Any]:
    """Errors by group and by run."""
    groups = {
        name: {
            label: fit.summary([v.error for v in runs if key(v) == label]) for label in sorted({key(v) for v in runs})
        }
        for name, key in GROUPS.items()
    }
    return {
        "all": fit.summary([v.error for v in runs]),
        "one_a_configuration": fit.summary([v.error for v in distinct(runs)]),
        "by": groups,
        "runs": [dataclasses.asdict(v) for v in runs],
    }


def write(directory: str | Path, constants: Constants, runs: Sequence[Validated]) -> list[Path]:
    """`constants.json` and `validated.csv` in `directory`, each at once or not at all."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        values = {name: float(f"{value:.4g}") for name, value in constants.values.items()}
        texts = {
            "constants.json": json.dumps({"basis": constants.basis, "values": values}, indent=1) + "\n",
            "validated.csv": sure.dumps(runs),
        }
        written = []
        for name, text in texts.items():
            path, part = folder / name, folder / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
            written.append(path)
    except OSError as error:
        raise UserError(f"--fit {directory}: {error.strerror}") from None
    return written


def distinct(runs: Sequence[Validated]) -> list[Validated]:
    """One run a configuration: hundreds of published rows are near copies of each other."""
    return list({(v.model, v.system, v.stack, v.precision, v.mapping, v.accelerators): v for v in runs}.values())


def table(runs: Sequence[Validated], left_out: Sequence[str] = ()) -> str:
    """Errors by group, and the worst runs, for a terminal."""
    if not runs:
        raise UserError("nothing was validated: run `timetrial validate --fit DIR` with rows that can be predicted")
    lines = [_head()]
    lines.append(_line("all runs", [v.error for v in runs], [v.fitted_error for v in runs]))
    once = distinct(runs)
    lines.append(_line("one a configuration", [v.error for v in once], [v.fitted_error for v in once]))
    for name, key in GROUPS.items():
        lines.append("")
        groups: dict[str, list[Validated]] = {}
        for v in runs:
            groups.setdefault(key(v), []).append(v)
        for label in sorted(groups, key=_order):
            own = groups[label]
            lines.append(_line(f"{name} {label}", [v.error for v in own], [v.fitted_error for v in own]))
    lines += ["", "farthest off:"]
    for v in sorted(once, key=lambda v: -abs(v.error))[:12]:
        lines.append(
            f"  {100 * v.error:+6.1f} %  {v.model} on {v.accelerators} {v.system}, {v.precision}, {v.mapping}"
            f" ({v.source}, {v.stack}; {v.published_s:.4g} s)"
        )
    if left_out:
        reasons: dict[str, int] = {}
        for text in left_out:
            reason = text.split(": ", 1)[-1]
            reasons[reason] = reasons.get(reason, 0) + 1
        lines += ["", f"{len(left_out)} rows without a prediction:"]
        lines += [f"  {n:4d}  {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def _head() -> str:
    return (
        f"{'':34s} {'without its system':>30s}   {'all systems fitted':>26s}\n"
        f"{'':34s} {'n':>4s} {'median':>8s} {'90th pc':>8s} {'bias':>7s}   {'median':>8s} {'90th pc':>8s} {'bias':>7s}"
    )


def _line(label: str, errors: Sequence[float], fitted: Sequence[float]) -> str:
    a, b = fit.summary(errors), fit.summary(fitted)
    return (
        f"{label:34s} {a['n']:4.0f} {100 * a['median']:7.1f}% {100 * a['p90']:7.1f}% {100 * a['bias']:+6.1f}%"
        f"   {100 * b['median']:7.1f}% {100 * b['p90']:7.1f}% {100 * b['bias']:+6.1f}%"
    )


def _size(accelerators: int) -> str:
    for most in (8, 72, 512):
        if accelerators <= most:
            return f"up to {most}"
    return "more than 512"


def _order(label: str) -> tuple[int, str]:
    words = label.split()
    return (int(words[-1]) if words[-1].isdigit() and len(words) > 1 else 0, label)
