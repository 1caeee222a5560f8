"""A directory made by `timetrial data build`: what it is of, its tokenizer, and its two splits.

dataset.json            source, tokenizer
tokenizer.json          the tokenizer itself
train/, heldout/        token files (`tokenfile.py`)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timetrial.data.tokenfile import TokenFiles, check_tokenizer, disk_errors, read_json, write_json
from timetrial.data.tokenizer import Tokenizer, check_known
from timetrial.errors import UserError

SPLITS = ("train", "heldout")


def describe(directory: Path, source: str, tokenizer: Tokenizer) -> None:
    """Write dataset.json and tokenizer.json. Raises UserError when they are there and say otherwise."""
    if (directory / "dataset.json").exists():
        values = read_json(directory / "dataset.json", f"remove {directory} and build it again")
        if values["source"] != source:
            raise UserError(f"{directory} holds {values['source']}, not {source}; choose another --out")
        if values["tokenizer_sha256"] != tokenizer.sha256:
            raise UserError(
                f"{directory} is made with tokenizer {values['tokenizer']} (sha256 {values['tokenizer_sha256'][:12]}), "
                f"not with {tokenizer.name} ({tokenizer.sha256[:12]}); choose another --out"
            )
        return
    with disk_errors(directory):
        temporary = directory / "tokenizer.json.tmp"
        temporary.write_text(tokenizer.json, encoding="utf-8")
        temporary.replace(directory / "tokenizer.json")
    values = {
        "source": source,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id,
    }
    write_json(directory / "dataset.json", values)


def read(directory: Path) -> tuple[dict[str, Any], Tokenizer]:
    """(dataset.json, the tokenizer). Raises UserError when one is missing or altered."""
    advice = f"make it with: timetrial data build SOURCE --input DIR --tokenizer FILE --out {directory}"
    values = read_json(directory / "dataset.json", advice)
    try:
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise UserError(f"{directory / 'tokenizer.json'} is missing or damaged; {advice}") from None
    tokenizer = Tokenizer(values["tokenizer"], text, values["eos_id"], values["bos_id"])
    if tokenizer.sha256 != values["tokenizer_sha256"]:
        raise UserError(f"{directory / 'tokenizer.json'} was altered; {advice}")
    return values, tokenizer


def open_dataset(directory: Path, source: str, wanted: str) -> tuple[dict[str, TokenFiles], Tokenizer]:
    """(split -> token files, tokenizer).

    Raises UserError when the directory is of another source, of another tokenizer than the one
    `wanted` names, or not complete.
    """
    values, tokenizer = read(directory)
    if values["source"] != source:
        raise UserError(f"{directory} holds {values['source']}, this run reads {source}; give another --data")
    check_known(tokenizer, wanted, str(directory))
    splits = {split: TokenFiles(directory / split) for split in SPLITS}
    for files in splits.values():
        check_tokenizer(files.meta, tokenizer, files.directory)
    return splits, tokenizer
