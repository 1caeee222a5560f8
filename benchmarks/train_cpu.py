"""Tokens per second of Timetrial and of its peers: the same Llama on this machine's processors, turn by turn.

    python benchmarks/train_cpu.py [--threads 2] [--ranks 1] [--rounds 5] [--steps 3] [--only NAMES]
                                   [--out FILE.json] [--env DIR] [--profile] [--shape dim=64,layers=2]

A model of 32 million parameters, 4,096 tokens a step, fp32, AdamW, clipping; random tokens. Each contestant
is built and warmed up once, in processes of its own. Then rounds: each makes --steps steps while the others
sleep, in an order that rotates. With --ranks N, N data-parallel ranks share the threads and the batch.
The peers run in an environment that is made in --env on first use, with pinned versions; Timetrial runs under
the interpreter that runs this file. docs/speed.md says what each contestant is and how to read the tables.

Exit code 1 when a contestant failed or they did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import environment, figures
from peers.contestant import ENTRIES, Contestant, Entry, interpreter
from peers.shape import Shape, parse

WARM_UP = 3
"""Steps of each before the rounds: they compile, allocate, and show the losses that must agree."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(entry.name for entry in ENTRIES)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all ranks; default: all cores")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each contestant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--only", default="", help=f"names, by commas, of {names}")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    parser.add_argument("--env", type=Path, default=Path(__file__).parent / ".peers", help="the peers' environment")
    parser.add_argument("--shape", type=parse, default=Shape(), help="another model, for trying the benchmark out")
    parser.add_argument("--profile", action="store_true", help="also show where Timetrial's step goes")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name]
    if unknown := [name for name in chosen if name not in {entry.name for entry in ENTRIES}]:
        parser.error(f"--only {unknown[0]}: unknown; there are {names}")
    if min(options.ranks, options.threads, options.steps) < 1 or options.rounds < 0:
        parser.error("--ranks, --threads and --steps must be at least 1, --rounds at least 0")
    if options.shape.batch % options.ranks:
        parser.error(f"--ranks {options.ranks} does not divide the batch of {options.shape.batch}")
    options.entries = [entry for entry in ENTRIES if not chosen or entry.name in chosen]
    options.rank_threads = max(1, options.threads // options.ranks)
    return options


def say(text: str) -> None:
    print(text, flush=True)


def start(entry: Entry, options: argparse.Namespace, peers: Path, logs: Path) -> Contestant:
    """Build a contestant and warm it up. Raises RuntimeError when it cannot run."""
    began = time.monotonic()
    contestant = Contestant(entry, options.shape, interpreter(entry, peers), options.ranks, options.rank_threads, logs)
    try:
        contestant.turns.append(contestant.go(WARM_UP))
    except RuntimeError:
        contestant.close()
        raise
    losses = ", ".join(f"{loss:.3f}" for loss in contestant.turns[0].losses)
    say(f"{entry.name}: ready after {time.monotonic() - began:.0f} s, losses {losses}")
    return contestant


def play(contestants: list[Contestant], options: argparse.Namespace) -> None:
    """The rounds, each beginning with another contestant."""
    for number in range(options.rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            contestant.turns.append(contestant.go(options.steps))
        last = "  ".join(f"{c.entry.name} {figures.rates(c, options.shape)[-1]:,.0f}" for c in contestants)
        say(f"round {number + 1}: {last}  (load {os.getloadavg()[0]:.1f})")


def machine() -> dict[str, Any]:
    """What the figures depend on besides the contestants."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def race(options: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Compare the chosen contestants; what was found goes into `found`. True when all was as it should be."""
    peers = environment.python(options.env) if any(entry.peer for entry in options.entries) else Path(sys.executable)
    contestants: list[Contestant] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="train-cpu-") as logs:
        try:
            for entry in options.entries:
                try:
                    contestants.append(start(entry, options, peers, Path(logs)))
                except RuntimeError as error:
                    failed.append(str(error))
                    say(f"error: {error}")
            if contestants:
                play(contestants, options)
        finally:
            for contestant in contestants:
                contestant.close()
    if not contestants:
        return False
    rows = [figures.row(contestant, options.shape) for contestant in contestants]
    figures.compare(rows)
    doubts = figures.doubts(rows, contestants, options.shape)
    say(f"\n{figures.work_table(rows)}\n\n{figures.table(rows)}")
    for doubt in doubts:
        say(f"doubt: {doubt}")
    found["contestants"], found["doubts"], found["failed"] = rows, doubts, failed
    return not failed and not doubts


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the contestants are ended, too
    shape = options.shape
    found: dict[str, Any] = {"machine": machine(), "shape": asdict(shape)}
    found |= {name: getattr(options, name) for name in ("ranks", "rank_threads", "rounds", "steps")}
    say(
        f"{shape.parameters:,} parameters, {shape.tokens:,} tokens and {shape.flops / 1e9:,.0f} GFLOP a step; "
        f"{options.ranks} rank(s) of {options.rank_threads} thread(s) on {found['machine']['processor']}"
    )
    good = race(options, found) if options.rounds else True
    if options.profile:
        from peers import where

        found["profile"] = where.measure(shape, options.rank_threads)
        say("\n" + where.table(found["profile"], shape))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
