"""A run with every official hyperparameter of Llama 3.1 8B, its model shrunk, and the checkers' verdict.

    python benchmarks/official_log.py --out DIR [--nproc N]

What takes part: C4-shaped shards (made of the bundled addresses, repeated, since 1,024 held-out sequences
of 8,192 tokens are more text than is bundled), `timetrial data build c4`, the official preset of the newest
round at its own batch size, sequence length, evaluation interval and target, and the official compliance
checker of every ruleset that has the benchmark. The model has one layer of eight channels and predicts
bytes, for which a log perplexity of 3.3 is easy; it says nothing about training quality and its log says
that it is no MLPerf result. About half an hour on two cores: 12,288 sequences until the first evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

from timetrial.data import bundled
from timetrial.data.tokenizer import bundled_tokenizer
from timetrial.results import compliance

SHRUNK = {
    "model.vocab_size": "264", "model.dim": "8", "model.n_heads": "1", "model.n_kv_heads": "1", "model.ffn_dim": "8",
}  # fmt: skip
RULESETS = ("5.1.0", "6.0.0", "6.1.0")
HELD_OUT_TOKENS = 1024 * 8192 + 1


def shards(directory: Path) -> None:
    """Files named and shaped like those of C4."""
    directory.mkdir(parents=True, exist_ok=True)
    train, heldout = bundled.split(bundled.documents("sotu"))
    length = sum(len(document.text.encode()) for document in heldout)
    repeats = -(-HELD_OUT_TOKENS // length)
    for name, documents, times in (
        ("c4-train.00768-of-01024.json.gz", train, 1),
        ("c4-validation.00000-of-00008.json.gz", heldout, repeats),
    ):
        with gzip.open(directory / name, "wt", encoding="utf-8", compresslevel=1) as file:
            for _ in range(times):
                file.writelines(json.dumps({"text": document.text}) + "\n" for document in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=1, help="0 leaves embedding, norm and head: a tenth of the time")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    out: Path = arguments.out
    timetrial = [sys.executable, "-m", "timetrial"]
    if not (out / "tokens" / "dataset.json").exists():
        shards(out / "c4")
        tokenizer = out / "bytes"
        tokenizer.mkdir(exist_ok=True)
        (tokenizer / "tokenizer.json").write_text(bundled_tokenizer(258).json)
        build = [*timetrial, "data", "build", "c4", "--input", out / "c4", "--tokenizer", tokenizer]
        subprocess.run([*build, "--out", out / "tokens"], check=True)
    shrunk = {**SHRUNK, "model.n_layers": str(arguments.layers)}
    sets = [word for key, value in shrunk.items() for word in ("--set", f"{key}={value}")]
    run = out / "run"
    subprocess.run(
        [*timetrial, "train", "llama31_8b", "--preset", "official", "--data", out / "tokens", "--out", run,
         "--nproc", str(arguments.nproc), "--threads", str(arguments.threads), "--set", "data.tokenizer=bytes", *sets],
        check=True,
    )  # fmt: skip
    for ruleset in RULESETS:
        print(ruleset, compliance.check(run / "result_0.txt", ruleset))


if __name__ == "__main__":
    main()
