"""Write the golden losses of workloads: `python tests/golden/make.py [WORKLOAD ...]`.

The first steps of each mini preset from random weights. A change that moves them moves what is
trained; when that is meant, write them anew in the same commit and say why.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from timetrial.config import Init, replace
from timetrial.results.summary import read_lines
from timetrial.train.run import train_run
from timetrial.workloads.workload import names, resolve

STEPS = 8


def losses(workload: str) -> list[float]:
    """Loss of each of the first steps; bases are left out, since making one takes minutes."""
    config = replace(resolve(workload, "mini"), init=Init(), max_steps=STEPS, checkpoint_every=0, seed=1)
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        train_run(config, run, resume=False, command="golden", quiet=True)
        return [row["loss"] for row in read_lines(run / "metrics.jsonl")]


if __name__ == "__main__":
    for name in sys.argv[1:] or names():
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(losses(name)) + "\n")
        print(path.name)
