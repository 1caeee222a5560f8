"""From turns to tables. A round's throughput is that of its median step, a contestant's that of its median round."""

from __future__ import annotations

import statistics
from typing import Any

from peers.contestant import Contestant
from peers.shape import Shape

LOSS_SPREAD = 0.1
"""First losses of random weights on random tokens lie this close together, nats, where all train the same model."""
HARNESS_SHARE = 0.01
"""Of a step, outside forward, backward and optimizer: more is not meant to be."""
IDLE_SHARE = 0.02
"""Of a core: more, used by all those that wait together, disturbs the one that runs."""


def rates(contestant: Contestant, shape: Shape) -> list[float]:
    """Tokens a second of each round."""
    return [shape.tokens / statistics.median(turn.seconds) for turn in contestant.turns[1:]]


def row(contestant: Contestant, shape: Shape) -> dict[str, Any]:
    """All figures of a contestant. The first turn is the warm-up: only its losses count."""
    measured = contestant.turns[1:]
    steps = [second for turn in measured for second in turn.seconds]
    per_cpu = [shape.tokens * len(turn.seconds) / turn.cpu_s for turn in measured]
    work = [w / s for turn in measured for w, s in zip(turn.work_s or [], turn.seconds, strict=False)]
    return {
        "name": contestant.entry.name,
        "peer": contestant.entry.peer and not contestant.entry.reference,
        "version": contestant.about["version"],
        "torch": contestant.about["torch"],
        "parameters": contestant.about["parameters"],
        "losses": contestant.turns[0].losses,
        "warm_up_s": contestant.turns[0].seconds,
        "step_s": [turn.seconds for turn in measured],
        "round_tokens_per_s": rates(contestant, shape),
        "tokens_per_s_median": statistics.median(rates(contestant, shape)),
        "tokens_per_s_best": shape.tokens / min(steps),
        "tokens_per_cpu_s": statistics.median(per_cpu),
        "peak_bytes": measured[-1].peak_bytes,
        "harness_share": 1 - statistics.median(work) if work else None,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its ratio to the fastest peer: of medians, and of the rounds one by one, least and most."""
    peers = [r for r in rows if r["peer"]]
    if not peers:
        return
    fastest = max(peers, key=lambda r: r["tokens_per_s_median"])
    for r in rows:
        rounds = [a / b for a, b in zip(r["round_tokens_per_s"], fastest["round_tokens_per_s"], strict=True)]
        r["against"] = fastest["name"]
        r["ratio"] = statistics.median(rounds)
        r["ratio_least"], r["ratio_most"] = min(rounds), max(rounds)
        r["cpu_ratio"] = r["tokens_per_cpu_s"] / fastest["tokens_per_cpu_s"]


def table(rows: list[dict[str, Any]]) -> str:
    """The comparison, fastest first."""
    head = (
        f"{'':18s} {'tokens/s':>8s} {'best':>6s} {'ratio (least-most)':>20s} {'tok/CPU s':>9s} {'ratio':>6s} {'GB':>5s}"
    )
    lines = [head]
    for r in sorted(rows, key=lambda r: -r["tokens_per_s_median"]):
        ratio, cpu = "", ""
        if "ratio" in r:
            ratio = f"{r['ratio']:.3f} ({r['ratio_least']:.3f}-{r['ratio_most']:.3f})"
            cpu = f"{r['cpu_ratio']:.3f}"
        lines.append(
            f"{r['name']:18s} {r['tokens_per_s_median']:8,.0f} {r['tokens_per_s_best']:6,.0f} {ratio:>20s} "
            f"{r['tokens_per_cpu_s']:9,.0f} {cpu:>6s} {r['peak_bytes'] / 1e9:5.1f}"
        )
    against = next((r["against"] for r in rows if "against" in r), None)
    if against:
        lines.append(f"ratio: to {against}, the fastest peer; median of the rounds, and their least and most")
    for r in rows:
        if r["harness_share"] is not None:
            share = r["harness_share"]
            lines.append(f"{r['name']}: {share:.2%} of a step outside forward, backward and optimizer")
    return "\n".join(lines)


def work_table(rows: list[dict[str, Any]]) -> str:
    """Who trained what: equal parameters and close losses mean equal work."""
    lines = [f"{'':18s} {'parameters':>11s}  loss of steps 1, 2, 3"]
    for r in rows:
        losses = "  ".join(f"{loss:.4f}" for loss in r["losses"][:3])
        lines.append(f"{r['name']:18s} {r['parameters']:11,d}  {losses}   {r['version']}, torch {r['torch']}")
    return "\n".join(lines)


def doubts(rows: list[dict[str, Any]], contestants: list[Contestant], shape: Shape) -> list[str]:
    """What makes the comparison unfair or the figures unsure; empty when nothing does."""
    found = []
    for r in rows:
        if r["parameters"] != shape.parameters:
            found.append(f"{r['name']} has {r['parameters']:,} parameters, not {shape.parameters:,}")
        if (r["harness_share"] or 0.0) > HARNESS_SHARE:
            found.append(f"{r['name']} spends {r['harness_share']:.1%} of a step outside the training proper")
    for step in range(min(3, *(len(r["losses"]) for r in rows))):
        losses = [r["losses"][step] for r in rows]
        if max(losses) - min(losses) > LOSS_SPREAD:
            found.append(f"losses of step {step + 1} lie {max(losses) - min(losses):.3f} apart")
    if len({r["torch"] for r in rows}) > 1:
        found.append("not all run on the same build of torch: " + ", ".join(sorted({r["torch"] for r in rows})))
    # while others were still being built, waiting disturbed no measurement: the first wait does not count
    waiting = sum(turn.idle_cpu_s for c in contestants for turn in c.turns[2:])
    running = sum(sum(turn.seconds) for c in contestants for turn in c.turns[1:])
    if waiting > IDLE_SHARE * running:
        found.append(f"those that waited kept {waiting / running:.1%} of a core busy")
    return found
