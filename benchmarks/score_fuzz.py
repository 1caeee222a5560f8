"""Fuzz the reader of result logs for a while: `python benchmarks/score_fuzz.py --seconds 120`.

Coverage-guided: a damaged log that takes a path through the reader which none took before joins the logs that are
damaged next. Paths are pairs of lines, seen by `sys.monitoring` (Python 3.12) or `sys.settrace`. What must hold of
each case is `score_mutations.oddity`: no traceback; the very time of the official reading, or a finding that says why
not. Prints the count; ends with 1 and the cases where something did not hold.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from score_mutations import Place, apply, oddity, seeds, some
from timetrial.results import odd, read, runs

WATCHED = frozenset(module.__file__ for module in (read, odd, runs))
KEPT = 4096
"""Most logs that are kept to start from."""


class Paths:
    """Pairs of lines of the watched files that ran one after the other."""

    def __init__(self) -> None:
        self.known: set[tuple[int, int]] = set()
        self.now: set[tuple[int, int]] = set()
        self._last = 0

    def _step(self, code: types.CodeType, line: int) -> None:
        here = hash((code.co_filename, line))
        self.now.add((self._last, here))
        self._last = here

    def watch(self) -> None:
        """Begin; once."""
        monitoring = getattr(sys, "monitoring", None)
        if monitoring is None:
            sys.settrace(self._enter)
            return
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "score_fuzz")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _line(self, code: types.CodeType, line: int) -> object:
        if code.co_filename not in WATCHED:
            return sys.monitoring.DISABLE
        self._step(code, line)
        return None

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> object:
        return self._inside if frame.f_code.co_filename in WATCHED else None

    def _inside(self, frame: types.FrameType, event: str, argument: object) -> object:
        if event == "line":
            self._step(frame.f_code, frame.f_lineno)
        return self._inside

    def new(self) -> int:
        """How many pairs the case just done has that none had before."""
        fresh = self.now - self.known
        self.known |= fresh
        self.now = set()
        return len(fresh)


def splice(one: bytes, other: bytes, dice: random.Random) -> bytes:
    """The head of one log and the tail of another, cut at lines or anywhere."""
    if dice.random() < 0.5:
        a, b = one.splitlines(keepends=True), other.splitlines(keepends=True)
        return b"".join(a[: dice.randrange(len(a) + 1)] + b[dice.randrange(len(b) + 1) :])
    return one[: dice.randrange(len(one) + 1)] + other[dice.randrange(len(other) + 1) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blind", action="store_true", help="without coverage, for comparison")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    whole = seeds()
    corpus = list(whole)
    paths = Paths()
    rules: collections.Counter[str] = collections.Counter()
    failures: list[tuple[str, bytes]] = []
    counted = cases = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory))
        if not options.blind:
            paths.watch()
        started = time.perf_counter()
        while time.perf_counter() - started < options.seconds:
            data = dice.choice(dice.choice((whole, corpus, corpus[-64:])))
            if dice.random() < 0.2:
                data = splice(data, dice.choice(corpus), dice)
            data = apply(data, some(dice))
            cases += 1
            try:
                wrong, run = oddity(place.write(data))
            except Exception as error:
                failures.append((f"{type(error).__name__}: {error}", data))
                continue
            counted += run.converged
            rules.update({found.rule for found in run.findings})
            if wrong:
                failures.append((wrong, data))
            if paths.new() and len(data) < 20_000 and len(corpus) < KEPT:
                corpus.append(data)
        took = time.perf_counter() - started
        sys.settrace(None)
    print(f"{cases:,} cases in {took:.0f} s ({cases / took:,.0f} a second), seed {options.seed}")
    print(f"{len(paths.known):,} pairs of lines, {len(corpus):,} logs kept, {counted:,} runs with the official time")
    print("findings: " + ", ".join(f"{rule} {count:,}" for rule, count in rules.most_common()))
    for what, data in failures[:5]:
        print(f"FAILED: {what}\n{data!r}")
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
