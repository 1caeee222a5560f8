"""How fast predictions and searches are: Llama 3.1 405B on 2,496 and on 100,000 accelerators.

    python benchmarks/predict_speed.py [--rounds 3] [--workers 2]

Every figure is from fresh processes. Cold: an empty cache directory; warm: the same again. A search tries all plans of
`Space()`, traces included. Medians over --rounds for predictions; searches run once cold and once warm. Peers' rates
(configurations per CPU second, two shared cores) were measured apart and are printed as such.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = {"llm-analysis 0.2.2": 1118.0, "Calculon": 31.0, "SimuMax 1.2": 5.6}
"""Configurations per CPU second as measured earlier on two shared cores."""
ROW = {"benchmark": "llama31_405b", "accelerator": "GB200", "precision": "fp8", "round": "v5.0"}
MAPPING = {
    "accelerators": "2496",
    "gbs": "1248",
    "tp": "4",
    "cp": "2",
    "pp": "8",
    "vp": "8",
    "tp_pp_dp_mapping": "true",
}
SEARCHES = (("2,496", {"accelerators": "2496", "gbs": "1248"}), ("100,000", {"accelerators": "100000", "gbs": "5000"}))


def one() -> dict[str, float]:
    """In a process of its own: one prediction, imports counted in."""
    start = time.perf_counter()
    from timetrial.predict.predict import predict
    from timetrial.predict.request import request

    predicted = predict(request(ROW | MAPPING))
    first = time.perf_counter() - start
    predict(request(ROW | MAPPING))
    return {"s": first, "again_s": time.perf_counter() - start - first, "step_s": predicted.step.seconds}


def all_plans(cells: dict[str, str], workers: int) -> dict[str, float]:
    """In a process of its own: one search, imports counted in."""
    start = time.perf_counter()
    from timetrial.predict.search import search
    from timetrial.predict.space import question

    found = search(question(ROW | cells), workers=workers)
    seconds = time.perf_counter() - start
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "s": seconds,
        "cpu_s": sum(use.ru_utime + use.ru_stime for use in uses),
        "mib": max(use.ru_maxrss for use in uses) / 1024,
        "plans": found.tried,
        "best_s": found.ranked[0].seconds,
    }


def fresh(cache: str, *arguments: str) -> dict[str, float]:
    """What this file prints in a new process with its caches in `cache`."""
    environment = os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    result: dict[str, float] = json.loads(subprocess.check_output(command, env=environment, text=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each prediction")
    parser.add_argument("--workers", type=int, default=2, help="processes of a search")
    parser.add_argument("--only", choices=("one", *(name for name, _ in SEARCHES)), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(one() if given.only == "one" else all_plans(dict(SEARCHES)[given.only], given.workers)))
        return
    cold, warm = [], []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(fresh(cache, "--only", "one"))
            warm.append(fresh(cache, "--only", "one"))
    for name, rows in (("cold", cold), ("warm", warm)):
        first, again = (statistics.median(row[key] for row in rows) for key in ("s", "again_s"))
        print(f"predict 405B on 2,496, {name}: {first:.2f} s in a fresh process, {again * 1e3:.0f} ms once more in it")
    for name, _ in SEARCHES:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                row = fresh(cache, "--only", name, "--workers", str(given.workers))
                print(
                    f"search 405B on {name}, {state}: {row['plans']:,.0f} plans in {row['s']:.1f} s "
                    f"({row['plans'] / row['s']:,.0f} a second, {row['plans'] / row['cpu_s']:,.0f} a CPU second), "
                    f"{row['mib']:.0f} MiB at most in one process; best step {row['best_s']:.3f} s"
                )
    for peer, rate in PEERS.items():
        print(f"{peer}: {rate:,.1f} configurations a CPU second (measured earlier, not here)")
    print(f"load of the machine now: {Path('/proc/loadavg').read_text().split()[0]} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
