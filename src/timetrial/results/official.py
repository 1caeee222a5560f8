"""The official tools underneath: the verdict of mlperf-logging, word for word, in a process of its own.

This is the one place that knows what is wrong with mlperf-logging 4.1.68:

| # | symptom | here |
| --- | --- | --- |
| 1 | without --ruleset (compliance: 6.1.0) or --rcp_version (6.0.0) a log is held to another round | always given |
| 2 | compliance_checker.log and others are written into the current directory | functions called, not commands |
| 3 | exit status 1 for a failed log and for its own crash | a crash is a message `checker crashed: ...` |
| 4 | FileNotFoundError on a benchmark that the ruleset has no file for | said so, with those it has |
| 5 | a target check on a value that is no number ends in a TypeError | as 3 |
| 6 | its queue of rule files is a module global: after a crash the next log gets the rest | emptied before each log |
| 7 | every rule file is parsed again for every log, every expression for every line | parsed once a process |
| 8 | starting Python and pandas takes about a second a log | one process for many logs |
| 9 | the whole log is read into memory | logs above LARGEST bytes are not given to it, and that is said |
| 10 | its rule files are run with eval() | away from us: in a process that holds nothing of ours |
| 11 | package_checker exits 0 though it found errors | "FOUND NO ERRORS" in what it says |
| 12 | package_checker writes and removes scaling.json in the results it checks | run on links in a temporary tree |
| 13 | `package_checker_params`: a line counts only without its newline, so only the last | lines are read stripped |
| 14 | system_desc_checker: TypeError where a field is a number | numbers written as text in the copy it sees |
| 15 | system_desc_checker exits 0 whatever it finds | its function's answer is taken |
| 16 | system_desc_checker: a bad status hides all missing fields | `description.py` names them all |
| 17 | rcp_checker.check_directory: its default rcp_pass='full_rcp' is an unbound variable | 'pruned_rcps' given |
| 18 | rcp_checker without set_scaling removes /scaling.json of the file system's root | that function does nothing |
| 19 | rcp_checker finds keys by substring in the line | told with the log (`read.py`), the verdict stands |
| 20 | result_summarizer.compute_score: "too many values to unpack", --xlsx: config.yaml missing | not called |
| 21 | repo_checker returns failure even where it says ALL CHECKS PASSED (repo_checker.py:94) | not called |
| 22 | EXACTLY_ONE: several events of the same value are only a warning | told as such (`check.py`) |
| 23 | 405B: learning rate compared as exact floats | `contradiction.405b_learning_rate` |

Where its rules differ from the rules' text: `rules/text.toml`, docs/score-rules.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from timetrial.errors import UserError

WORKER = Path(__file__).with_name("official_worker.py")
LARGEST = 512 << 20
"""Largest log given to the checker, bytes; it needs some five times that in memory."""
SEPARATOR = "\n" + "-" * 30 + "\n"
What = Literal["log", "description", "convergence", "package"]


@dataclass(frozen=True)
class Verdict:
    """What an official tool says."""

    ruleset: str
    passed: bool
    messages: tuple[str, ...]
    """Reasons of a failure and warnings, each as the tool words it."""
    skipped: bool = False
    """The tool was not asked: the log is too large for it."""

    @property
    def lines(self) -> tuple[str, ...]:
        """SUCCESS or FAILED, as the tool says it, then its messages."""
        return ("SUCCESS" if self.passed else "FAILED", *self.messages)


class Official:
    """The official tools in one process for many questions; started with the first one.

    Use as a context manager or call `close`. Not to be shared between threads.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        """Longest wait for one answer, seconds; then the process is ended and the verdict says so."""
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._errors: BinaryIO | None = None

    # ---- questions ---------------------------------------------------------------------------------

    def log(self, path: Path, ruleset: str) -> Verdict:
        """Compliance of one log. Raises UserError when it cannot be read or the ruleset does not exist."""
        _known(ruleset)
        try:
            size = path.stat().st_size
            with path.open("rb"):
                pass
        except OSError as error:
            raise UserError(f"cannot read the result log {path}: {error.strerror}") from None
        if size > LARGEST:
            said = f"not checked: {size >> 20} MiB, and the official checker reads a log whole; {LARGEST >> 20} at most"
            return Verdict(ruleset, False, (said,), skipped=True)
        answer = self._ask("log", path, ruleset)
        messages = [part.strip() for text in _texts(answer, "WARNING") for part in text.split(SEPARATOR)]
        return _verdict(answer, ruleset, [m for m in messages if m])

    def logs(self, paths: Iterable[Path], ruleset: str) -> Iterator[Verdict]:
        """Compliance of many logs, in their order."""
        for path in paths:
            yield self.log(path, ruleset)

    def description(self, path: Path, ruleset: str) -> Verdict:
        """The system description checker on one systems/SYSTEM.json."""
        _known(ruleset)
        answer = self._ask("description", path, ruleset)
        return _verdict(answer, ruleset, [text.strip() for text in _texts(answer, "ERROR")])

    def convergence(self, directory: Path, ruleset: str) -> Verdict:
        """The reference-convergence checker on one benchmark's directory; its last message holds the factor."""
        _known(ruleset)
        answer = self._ask("convergence", directory, ruleset)
        return _verdict(answer, ruleset, [text.strip() for text in _texts(answer, "WARNING", "ERROR")])

    def package(self, organization: Path, ruleset: str) -> Verdict:
        """The package checker on one organization's tree; nothing is written into it."""
        _known(ruleset)
        answer = self._ask("package", organization, ruleset)
        return _verdict(answer, ruleset, [text.strip() for text in _texts(answer, "WARNING", "ERROR")])

    # ---- the process -------------------------------------------------------------------------------

    def __enter__(self) -> Official:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            process.terminate()
            process.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if self._place is not None:
            self._place.cleanup()
            self._place = None
        self._said = b""

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._place = tempfile.TemporaryDirectory()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._place.name,
            )
        return self._process

    def _ask(self, what: What, path: Path, ruleset: str) -> dict[str, Any]:
        process = self._start()
        request = json.dumps({"what": what, "path": os.path.abspath(path), "ruleset": ruleset}) + "\n"
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode())
            process.stdin.flush()
            line = self._line(process)
        except (BrokenPipeError, EOFError):
            return self._ended("ended without an answer: " + self._last_error())
        except TimeoutError:
            return self._ended(f"gave no answer within {self.timeout_s:g} s")
        answer: dict[str, Any] = json.loads(line)
        return {**answer, "path": str(path)}

    def _ended(self, why: str) -> dict[str, Any]:
        if self._process is not None:
            self._process.kill()
        self.close()
        return {"passed": False, "records": [], "crash": why, "missing": ""}

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """One line of the process's answers. Raises TimeoutError, or EOFError where it has ended."""
        assert process.stdout is not None
        until = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise EOFError
                self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _last_error(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no word"


def check(log: Path, ruleset: str) -> Verdict:
    """The verdict on one log. Takes about a second; for many use `Official`."""
    with Official() as official:
        return official.log(log, ruleset)


def rulesets() -> tuple[str, ...]:
    """Every training ruleset of the installed mlperf-logging."""
    names = (path.name.removeprefix("training_") for path in _checker_directory().glob("training_*.*.0"))
    return tuple(sorted(names))


def _known(ruleset: str) -> None:
    if not (_checker_directory() / f"training_{ruleset}" / "common.yaml").exists():
        raise UserError(f"unknown ruleset {ruleset!r}; there are {', '.join(rulesets())}")


def _checker_directory() -> Path:
    spec = importlib.util.find_spec("mlperf_logging.compliance_checker")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("mlperf-logging is not installed; pip install mlperf-logging")
    return Path(spec.submodule_search_locations[0])


def _texts(answer: dict[str, Any], *levels: str) -> list[str]:
    return [text for level, text in answer["records"] if level in levels]


def _verdict(answer: dict[str, Any], ruleset: str, messages: list[str]) -> Verdict:
    if answer["crash"]:
        lacking = _lacking(answer["missing"], ruleset)
        messages = [lacking, *messages] if lacking else [*messages, f"checker crashed: {answer['crash']}"]
    return Verdict(ruleset, bool(answer["passed"]), tuple(messages))


def _lacking(missing: str, ruleset: str) -> str:
    """Why a rule file is not there, or empty where the file that is missing is another."""
    path = Path(missing)
    if path.suffix != ".yaml" or path.parent.name != f"training_{ruleset}":
        return ""
    division, _, benchmark = path.stem.partition("_")
    known = sorted(other.stem.split("_", 1)[1] for other in path.parent.glob(f"{division}_*.yaml"))
    if not known:
        return f"{division} is no division of ruleset {ruleset}"
    return f"{benchmark} is no benchmark of ruleset {ruleset}; it has {', '.join(k for k in known if k != 'common')}"
