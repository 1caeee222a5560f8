"""The process in which the official tools run: one request a line on standard input, one answer a line on output.

Started by `official.py` by this file's path, so that nothing of timetrial is imported here: the official checker runs
Python from its rule files, keeps state in module globals and configures logging, none of which is to touch us. What
the tools print goes nowhere. Requests and answers are JSON objects; see `_answer`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from mlperf_logging.compliance_checker import mlp_compliance

JOINED = (
    *("submitter", "system_name", "host_processor_model_name", "host_processor_core_count"),
    *("accelerator_model_name", "accelerators_per_node", "framework"),
)
"""Fields of a description that the checker joins as text."""


class _Records(logging.Handler):
    """What the tools say, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.said.append((record.levelname, record.getMessage()))
        except Exception as error:  # a message whose arguments do not fit must not end the check
            self.said.append((record.levelname, f"{record.msg} ({error})"))


def _rules_read_once() -> None:
    """The checker parses its rule files again for every log, and their expressions for every line."""
    parsed: dict[str, Any] = {}

    def load(file: Any, Loader: Any) -> Any:
        if file.name not in parsed:
            parsed[file.name] = yaml.load(file, Loader=Loader)
        return parsed[file.name]

    @functools.cache
    def compiled(source: str, how: str) -> types.CodeType:
        return compile(source, "rule", how)

    def evaluate(source: str, *where: Any) -> Any:
        return eval(compiled(source, "eval"), *where)

    def execute(source: str, *where: Any) -> None:
        exec(compiled(source, "exec"), *where)

    mlp_compliance.yaml = types.SimpleNamespace(load=load, BaseLoader=yaml.BaseLoader)
    mlp_compliance.eval, mlp_compliance.exec = evaluate, execute


def _log(request: dict[str, Any]) -> bool:
    mlp_compliance.enqueued_configs.clear()  # a crash leaves the rest of its queue for the next log
    ruleset = request["ruleset"]
    checker = mlp_compliance.make_checker("training", ruleset, False, False)
    valid, *_ = mlp_compliance.main(request["path"], f"training_{ruleset}/common.yaml", checker)
    return bool(valid)


def _description(request: dict[str, Any]) -> bool:
    from mlperf_logging.system_desc_checker import system_desc_checker

    path = _texts(Path(request["path"]), Path("description.json"))
    valid, *_ = system_desc_checker.check_system_desc(str(path), "training", request["ruleset"])
    return bool(valid)


def _texts(source: Path, target: Path) -> Path:
    """A copy of a description whose numbers, where they would crash the checker, are texts."""
    described = json.loads(source.read_text())
    if isinstance(described, dict):
        for name in JOINED:
            if isinstance(described.get(name), int | float):
                described[name] = str(described[name])
    target.write_text(json.dumps(described))
    return target


def _convergence(request: dict[str, Any]) -> bool:
    from mlperf_logging.rcp_checker import rcp_checker

    rcp_checker.RCP_Checker._reset_results_scaling = lambda self, directory: None  # else it removes /scaling.json
    passed, message, factor = rcp_checker.check_directory(
        request["path"], "training", request["ruleset"], False, False, rcp_pass="pruned_rcps"
    )
    logging.warning("%s; factor %s", message, factor)
    return bool(passed)


def _package(request: dict[str, Any]) -> bool:
    from mlperf_logging.package_checker import package_checker

    package_checker.open = _open_stripped  # it compares whole lines, newline and all, with "rcp-bypass"
    with tempfile.TemporaryDirectory() as made:
        copy = _mirror(Path(request["path"]), Path(made) / "organization")
        package_checker.check_training_package(
            str(copy), "training", request["ruleset"], False, False, False, False, False, "none"
        )
    said = [text for _, text in logging.getLogger().handlers[0].said]  # type: ignore[attr-defined]
    return any("FOUND NO ERRORS" in text for text in said)


def _open_stripped(path: Any, *arguments: Any) -> Any:
    if os.path.basename(str(path)) == "package_checker_params":
        return _Lines(Path(path).read_text())
    return open(path, *arguments)


class _Lines:
    """A file whose lines come without their ends."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def readlines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines()]


def _mirror(organization: Path, copy: Path) -> Path:
    """A tree of links to the logs, in which the checker may write and remove scaling.json."""
    (copy / "systems").mkdir(parents=True)
    for described in sorted((organization / "systems").glob("*.json")):
        _texts(described, copy / "systems" / described.name)
    (copy / "results").mkdir()
    if (organization / "benchmarks").is_dir():
        (copy / "benchmarks").symlink_to((organization / "benchmarks").resolve())
    for directory in sorted((organization / "results").glob("*/*")):
        if not directory.is_dir():
            target = copy / "results" / directory.parent.name / directory.name
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(directory.resolve())
            continue
        there = copy / "results" / directory.parent.name / directory.name
        there.mkdir(parents=True, exist_ok=True)
        for file in sorted(directory.iterdir()):
            if file.name != "scaling.json":
                (there / file.name).symlink_to(file.resolve())
    return copy


DOES = {"log": _log, "description": _description, "convergence": _convergence, "package": _package}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """{passed, records, crash}: `crash` is empty, or the type and text of what the tool raised."""
    records = _Records()
    root = logging.getLogger()
    root.handlers[:] = [records]
    root.setLevel(logging.INFO)
    passed, crash, missing = False, "", ""
    try:
        passed = DOES[request["what"]](request)
    except (Exception, SystemExit) as error:
        crash = f"{type(error).__name__}: {error}".splitlines()[0]
        missing = str(getattr(error, "filename", "") or "")
    return {"passed": passed and not crash, "records": records.said, "crash": crash, "missing": missing}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _rules_read_once()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
