"""`report.html`: one run as one page, from the files of its run directory alone.

The page asks nothing of the network: style sheet and charts are inline, there is no script, and a
content security policy forbids both, so a page from elsewhere is safe to open. It is written beside
its final name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timetrial
from timetrial.report import pages, summary, text
from timetrial.report import run as runs

NAME = "report.html"
MOST_ROWS = 400
"""Evaluations above which the page's table leaves some out."""


@dataclass(frozen=True)
class Chart:
    """One chart with its sentence, as the template shows it."""

    wide: str | None
    narrow: str | None
    words: str


def write(run_dir: Path) -> Path:
    """Makes `report.html` in `run_dir` from the files there, and returns its path.

    Works on unfinished runs. Raises UserError when the directory holds no run, when a file of it is
    damaged, or when the page cannot be written.
    """
    run_dir = Path(run_dir)
    return pages.write(render(runs.read(run_dir)), run_dir / NAME)


def render(run: runs.Run) -> str:
    """The page as HTML text."""
    environment = pages.environment()
    environment.filters.update(
        count=text.count, duration=text.duration, percent=text.percent, plain=text.plain, date=text.date
    )
    environment.filters["quality"] = lambda value: text.significant(value, 4)
    environment.globals["gap"] = lambda value: (
        ("+" if value > 0 else "") + text.significant(value).replace("-", text.MINUS)
    )
    style = pages.style("report.css")
    every = max(1, -(-len(run.evaluations) // MOST_ROWS))
    return environment.get_template("report.html.j2").render(
        style=style,
        run=run,
        verdict=summary.verdict(run),
        notice=summary.notice(run),
        headline=summary.headline(run),
        charts=_charts(run),
        phases=summary.phases(run),
        whole=summary.whole_run(run),
        evaluations=[e for i, e in enumerate(run.evaluations) if i % every == 0 or e is run.evaluations[-1]],
        first_due=summary.first_due(run),
        plan=summary.plan_rows(run),
        settings=_grouped(run.config),
        environment=_environment(run.environment),
        command=_command(run),
        revision=_revision(run.environment.get("revision")),
        date=text.date(run.environment["date"]) if run.environment.get("date") else None,
        parameters=text.compact(run.n_params) if run.n_params else None,
        version=timetrial.__version__,
    )


def _charts(run: runs.Run) -> dict[str, Chart]:
    from timetrial.report import plots

    charts = {}
    for name, draw, words in (
        ("loss", plots.loss, summary.loss_words(run)),
        ("throughput", plots.throughput, summary.throughput_words(run)),
        ("breakdown", plots.breakdown, summary.breakdown_words(run)),
    ):
        charts[name] = Chart(draw(run, True, words), draw(run, False, words), words)
    for name, small, words in (
        ("learning_rate", plots.learning_rate, summary.learning_rate_words(run)),
        ("gradient_norm", plots.gradient_norm, summary.gradient_norm_words(run)),
    ):
        charts[name] = Chart(small(run, words), None, words)
    return charts


def _grouped(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """(group, [(dotted key, value)]) of the resolved configuration; the run's own fields first."""
    own = [(key, value) for key, value in config.items() if not isinstance(value, Mapping)]
    groups = [(key, list(text.flatten(value, key))) for key, value in config.items() if isinstance(value, Mapping)]
    return [("run", own), *groups]


HARDWARE = {
    "processor.name": "Processor",
    "processor.architecture": "Architecture",
    "processor.instructions": "Vector instructions",
    "processor.cores_in_machine": "Cores in the machine",
    "processor.cores_available": "Cores available",
    "processor.cores_used": "Cores used",
    "processor.threads_per_rank": "Threads per rank",
    "memory_bytes": "Memory",
    "accelerators": "Accelerators",
    "world_size": "Ranks",
}
SOFTWARE = {
    "os": "Operating system",
    "revision.git": "Git revision",
    "revision.dirty": "Uncommitted changes",
    "date": "Date",
}


def _environment(values: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(group, [(words, value)]) of everything recorded: known keys in words, others as they are."""
    hardware, software = [], []
    for key, value in text.flatten(values):
        if key in HARDWARE:
            hardware.append((HARDWARE[key], _environment_value(key, value)))
        elif key != "command":
            words = SOFTWARE.get(key, key.removeprefix("versions."))
            software.append((words, _environment_value(key, value)))
    return [("Hardware", hardware), ("Software", software)]


def _environment_value(key: str, value: Any) -> str:
    if value is None:
        return "not recorded"
    if key == "accelerators" and isinstance(value, list):
        return ", ".join(map(_accelerator, value)) or "none"
    if key == "memory_bytes" and isinstance(value, int):
        return text.size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text.date(value) if key == "date" else text.plain(value)


def _accelerator(device: Any) -> str:
    if not isinstance(device, Mapping):
        return text.plain(device)
    size = f" ({text.size(device['memory_bytes'])})" if isinstance(device.get("memory_bytes"), int) else ""
    return f"{device.get('count', 1)} \u00d7 {device.get('name', 'unnamed')}{size}"


def _command(run: runs.Run) -> str | None:
    command = run.environment.get("command") or (run.result or {}).get("command")
    return text.plain(command) if command else None


def _revision(value: Any) -> tuple[str, bool] | None:
    """(git commit, whether the package had other changes), when recorded."""
    if not isinstance(value, Mapping) or not value.get("git"):
        return None
    return text.plain(value["git"]), bool(value.get("dirty"))
