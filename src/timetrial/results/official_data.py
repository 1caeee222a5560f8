"""Whether the data of an official run is the whole set that its benchmark is defined on.

What can be known is what the token files say of themselves: which parts there are and how many documents
they hold. That every document is the right one, and that pretrained weights are the published ones, no
run can tell: of the weights it knows that their names and shapes fit (`models/llama/hf.py`), no more.

C4 (allenai/c4, en): 364,868,892 training documents in 1,024 files of 356,317 or 356,318 each. Which files a
benchmark reads: `data/c4.py`. GovReport: the reference's packed sequences (`data/govreport.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from timetrial.config import RunConfig
from timetrial.data import c4, govreport
from timetrial.data.dataset import SPLITS
from timetrial.data.tokenfile import Meta, Part, read_meta
from timetrial.errors import UserError

C4_DOCUMENTS_PER_FILE = 364_868_892 // 1024
FILES_PER_MEGATRON_PART = 128

C4_FILES: Mapping[str, range] = {
    "llama31_8b": range(c4.FIRST_SHARD, c4.FIRST_SHARD + FILES_PER_MEGATRON_PART),
}
"""Workload -> the training files that its reference reads, where not all; more of them is no gap."""


def gaps(config: RunConfig) -> list[str]:
    """What is known to lack in `config.data`, in a few words each; empty where it looks whole."""
    look = _KNOWN.get(config.data.source)
    if look is None:
        return [f"data source {config.data.source}"]
    if config.data.path is None:
        return ["no data"]
    try:
        metas = {split: read_meta(Path(config.data.path) / split) for split in SPLITS}
    except UserError:  # whoever opens the data says what is wrong with it
        return ["data that cannot be read"]
    return look(config, metas)


def _c4(config: RunConfig, metas: Mapping[str, Meta]) -> list[str]:
    wanted = C4_FILES.get(config.workload, range(c4.FIRST_SHARD, c4.LAST_SHARD + 1))
    parts = {part.name: part for part in metas["train"].parts}
    whole = sum(_has_file(parts, file) for file in wanted)
    found = []
    if whole < len(wanted):
        found.append(f"{whole} of {len(wanted)} whole C4 training files")
    held = metas["heldout"].documents
    if held != c4.HELD_OUT_DOCUMENTS:
        found.append(f"{held:,} of {c4.HELD_OUT_DOCUMENTS:,} C4 validation documents")
    return found


def _has_file(parts: Mapping[str, Part], file: int) -> bool:
    """Whether training file number `file` is there as a whole, of its own or in one of the joined sets."""
    own = parts.get(f"{file:05d}")
    if own is not None:
        return own.documents >= C4_DOCUMENTS_PER_FILE
    joined = parts.get(c4.MEGATRON_TRAIN[(file - c4.FIRST_SHARD) // FILES_PER_MEGATRON_PART])
    return joined is not None and joined.documents >= FILES_PER_MEGATRON_PART * C4_DOCUMENTS_PER_FILE


def _govreport(config: RunConfig, metas: Mapping[str, Meta]) -> list[str]:
    return [
        f"{metas[split].documents:,} of {count:,} {split} sequences"
        for split, count in govreport.REFERENCE_SEQUENCES.items()
        if metas[split].documents != count
    ]


_KNOWN: Mapping[str, Callable[[RunConfig, Mapping[str, Meta]], list[str]]] = {"c4": _c4, "govreport": _govreport}
