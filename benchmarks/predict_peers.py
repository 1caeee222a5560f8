"""Predictors of training side by side: speed, accuracy, and what each cannot express, on the same questions.

    python benchmarks/predict_peers.py [--rounds 5] [--env DIR] [--out FILE.json] [--cold]

Speed: every plan of Llama 3.1 405B on 512 H100 (1,152 samples, fp8), single-threaded. Timetrial and the peers take
turns, each turn a fresh process, in an order that turns round from round to round; imports are not counted. Accuracy:
the published pretraining runs of Timetrial's own table. Peers run in environments of their own, made in --env.
docs/peers.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from peers import predictors, verdict
from peers.predictors import GALVATRON, LLM_ANALYSIS, TIMETRIAL, Answer

from timetrial.predict.space import Space

LEAST = 1000
"""Plans of a peer's turn, at least: it prices its list again and again until then."""


def say(text: str = "") -> None:
    print(text, flush=True)


def percent(found: list[float]) -> str:
    """Median size, 90th percentile and bias of errors."""
    sizes = sorted(abs(error) for error in found)
    high = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    return f"{statistics.median(sizes):7.1%} {high:7.1%} {statistics.median(found):+7.1%}"


class Race:
    """The turns: name of a turn -> its answers, round by round."""

    def __init__(self, env: Path, folder: Path, cold: bool) -> None:
        self.pythons = {p.name: p.python(env) for p in (TIMETRIAL, LLM_ANALYSIS, GALVATRON)}
        self.folder, self.warm = folder, folder / "warm"
        base, asked, self.plans = predictors.speed_question()
        self.all_plans = sum(plan["orders"] for plan in predictors.plans(base, Space()))
        peers = asked | {"task": "speed", "plans": self.plans, "repeats": -(-LEAST // len(self.plans))}
        self.asked = asked
        search = {"task": "searched", "row": predictors.ROW}
        self.turns = {
            "timetrial, search of the peers' plans": (TIMETRIAL, search | {"same": True}),
            "llm-analysis 0.2.2": (LLM_ANALYSIS, peers),
            "timetrial, search of all plans": (TIMETRIAL, search | {"same": False}),
            "hetu-galvatron 2.4.0 (made-up profile)": (GALVATRON, peers),
            "timetrial, plan by plan, laid out": (
                TIMETRIAL,
                {"task": "each", "row": predictors.ROW, "plans": self.plans},
            ),
        }
        if cold:
            self.turns["timetrial, search of all plans, cold"] = (TIMETRIAL, search | {"same": False})
        self.answers: dict[str, list[Answer]] = {name: [] for name in self.turns}

    def ask(self, predictor: predictors.Predictor, asked: Answer, cache: Path | None = None) -> Answer:
        return predictors.ask(predictor, self.pythons[predictor.name], asked, cache or self.warm)

    def play(self, rounds: int) -> None:
        """One turn of each that does not count, then the rounds."""
        for name, (predictor, asked) in self.turns.items():
            if not name.endswith("cold"):
                self.ask(predictor, asked)
        for number in range(rounds):
            names = list(self.turns)[:: -1 if number % 2 else 1]
            for name in names:
                predictor, asked = self.turns[name]
                with tempfile.TemporaryDirectory(dir=self.folder) as empty:
                    cache = Path(empty) if name.endswith("cold") else None
                    self.answers[name].append(self.ask(predictor, asked, cache))
            rates = "; ".join(f"{n.removeprefix('timetrial, ')} {self.rates(n, 'cpu_s')[-1]:,.0f}" for n in self.turns)
            say(f"round {number + 1}, plans a CPU second: {rates} (load {os.getloadavg()[0]:.1f})")

    def rates(self, name: str, clock: str) -> list[float]:
        return [(a["plans"] + a.get("failed", 0)) / a[clock] for a in self.answers[name]]

    def table(self) -> str:
        llm = "llm-analysis 0.2.2"
        lines = [
            "",
            f"Speed: medians of {len(self.answers[llm])} rounds. Peers have words for {len(self.plans):,} of "
            f"{self.all_plans:,} valid plans.",
            f"{'':42s} {'plans':>7s} {'a CPU s':>8s} {'(least-most)':>16s} {'a wall s':>8s} "
            f"{'x llm-analysis, CPU':>22s} {'start s':>8s} {'distinct':>8s} {'fit':>6s}",
        ]
        for name, found in self.answers.items():
            cpu, low, high = verdict.spread(self.rates(name, "cpu_s"))
            wall = statistics.median(self.rates(name, "wall_s"))
            times = verdict.ratio(self.rates(name, "cpu_s"), self.rates(llm, "cpu_s"))
            start = statistics.median(a["process_s"] - a["wall_s"] for a in found)
            distinct = found[0]["distinct"] if "search" not in name else "-"
            lines.append(
                f"{name:42s} {found[0]['plans']:7,} {cpu:8,.0f} {f'({low:,.0f}-{high:,.0f})':>16s} {wall:8,.0f} "
                f"{f'{times[0]:.3g} ({times[1]:.3g}-{times[2]:.3g})':>22s} {start:8.1f} {distinct!s:>8s} "
                f"{found[0].get('fits', '-')!s:>6s}"
            )
        lines += [
            "start: of the process, imports and all, wall; distinct: different step times among the plans; fit: plans "
            "that it finds to fit into memory"
        ]
        for name, (rate, _) in predictors.QUOTED.items():
            lines.append(f"{name}: {rate:,.1f} configurations a CPU second, measured earlier and not in this run")
        return "\n".join(lines)


def accuracy(race: Race, found: dict[str, Any]) -> str:
    """Step times of published runs, by Timetrial and by llm-analysis at four efficiencies."""
    runs, left = predictors.runs()
    ours = race.ask(TIMETRIAL, {"task": "rows", "rows": [{"cells": run.cells} for run in runs]})["seconds"]
    ideal = race.ask(LLM_ANALYSIS, {"task": "rows", "rows": [run.asked for run in runs]})["seconds"]
    published = [run.seconds for run in runs]
    bits, systems = [run.bits for run in runs], [run.system for run in runs]
    favoured, best = verdict.favoured(ideal, published, bits)
    columns: dict[str, list[float | None]] = {
        "timetrial, its constants": list(ours),
        "llm-analysis, one best efficiency a precision": list(favoured),
        "timetrial, constants fitted without the system": [run.without for run in runs],
        "llm-analysis, efficiency of all other systems": verdict.left_out(ideal, published, bits, systems),
        "llm-analysis, efficiency 0.5 (its source's hint)": [one / 0.5 for one in ideal],
        "llm-analysis, defaults (efficiency 1)": list(ideal),
    }
    groups: dict[str, list[bool]] = {
        "405B on H100": [run.system == "h100-sxm" for run in runs],
        "all systems": [True] * len(runs),
        "405B": ["405B" in run.model for run in runs],
        "70B": ["70B" in run.model for run in runs],
        "8B": ["8B" in run.model for run in runs],
    }
    strict = sum(run.expressible for run in runs)
    lines = [
        "",
        f"Accuracy: error of step time over {len(runs)} published pretraining runs in 16 and 8 bits: median size, 90th "
        "percentile, bias.",
        f"{strict} of them llm-analysis can express as they are; for the others cp counts as tp, vp is left out, int8 "
        "is fp8, accelerators that it does not ship are made from Timetrial's figures.",
        f"{'':50s}" + "".join(f"{f'{name} ({sum(own)})':>26s}" for name, own in groups.items()),
    ]
    for name, predicted in columns.items():
        cells = []
        for own in groups.values():
            pairs = [(a, b) for a, b, inside in zip(predicted, published, own, strict=True) if inside and a is not None]
            cells.append(percent(verdict.errors(*zip(*pairs, strict=True))) if pairs else "-")
        lines.append(f"{name:50s}" + "".join(f"{cell:>26s}" for cell in cells))
    none = {name: sum(one is None for one in column) for name, column in columns.items()}
    lines += [f"without an answer, {name}: {n} runs" for name, n in none.items() if n]
    lines.append("best efficiencies: " + ", ".join(f"{share:.3f} in {b} bits" for b, share in sorted(best.items())))
    lines += ["", "405B on H100, run by run: published s; timetrial; llm-analysis at its best, at its defaults"]
    for at, run in enumerate(runs):
        if run.system == "h100-sxm":
            shown = [columns[name][at] for name in list(columns)[:2]] + [ideal[at]]
            errors = "  ".join(f"{value / run.seconds - 1:+7.1%}" for value in shown if value is not None)
            lines.append(f"  {run.label:98s} {run.seconds:7.2f} s  {errors}")
    lines += ["", "rows left out:"] + [f"  {n:4d}  {why}" for why, n in reasons(left)]
    found["accuracy"] = {
        "runs": [{"label": run.label, "published_s": run.seconds} for run in runs],
        "seconds": columns,
        "best_efficiency": {str(b): share for b, share in best.items()},
    }
    return "\n".join(lines)


def reasons(left: list[str]) -> list[tuple[str, int]]:
    """Why rows are left out, the most frequent first."""
    return Counter(why.split(";")[0] for why in left).most_common()


def refusals(race: Race, found: dict[str, Any]) -> str:
    """What each says to what it cannot express."""
    asked = race.asked | {"task": "cannot", "plan": predictors.PUBLISHED, "row": predictors.ROW}
    lines = ["", "What they cannot express, in their own words:"]
    for predictor in (LLM_ANALYSIS, GALVATRON, TIMETRIAL):
        said = race.ask(predictor, asked)["said"]
        found.setdefault("said", {})[predictor.name] = said
        lines += [f"{predictor.name}:"] + [f"  {name}: {words}" for name, words in said]
    lines += ["Not in this run:"] + [f"  {name}: {why}" for name, why in predictors.ABSENT]
    for name, (rate, far) in predictors.QUOTED.items():
        lines.append(f"  {name}, quoted: {rate} configurations a CPU second; 405B on 512 H100 {far}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="searches with an empty cache, too")
    parser.add_argument("--env", type=Path, default=Path(__file__).parent / ".peers", help="the peers' environments")
    parser.add_argument("--out", type=Path, help="write all figures there as JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"rounds": options.rounds, "load_at_start": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="predict-peers-") as folder:
        race = Race(options.env, Path(folder), options.cold)
        race.play(options.rounds)
        say(race.table())
        say(accuracy(race, found))
        say(refusals(race, found))
    found["turns"] = race.answers
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    say(f"\nload now {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
