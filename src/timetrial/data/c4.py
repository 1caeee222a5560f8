"""C4 as the Llama 3.1 pretraining benchmarks use it: which files, and how text becomes tokens.

From mlcommons/training `small_llm_pretraining/nemo/` and `large_language_model_pretraining/nemo/`:

* c4/en 3.0.1. Training reads the last quarter of the training files, c4-train.00768 to .01023 of
  1,024 (README.md, "Training and test data separation"). `utils/consolidate_data.sh` joins 128 at a
  time into c4-train.en_0 ... en_7; the 405B run reads en_6 and en_7, and the 8B run reads en_6
  alone, files 768 to 895 (`get_data` in each `pretrain_llama31.py`).
* Validation reads the first 91,205 documents of the eight validation files, not shuffled, and
  evaluates on the first 1,024 (8B) or 5,760 (405B) sequences of 8,192.
* `preprocess_data_for_megatron.py` runs without `--append-eod`: documents follow each other with
  neither an end token nor a begin token between them. Empty documents are skipped.

What MLCommons distributes already tokenized, Megatron's .bin and .idx, is taken as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from timetrial.data.job import Job, Report, json_lines, text_of
from timetrial.data.megatron import MegatronPart
from timetrial.data.tokenfile import PartWriter
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

FIRST_SHARD, LAST_SHARD = 768, 1023
LAST_SHARD_8B = 895
HELD_OUT_DOCUMENTS = 91_205
HELD_OUT_SHARDS = 8
MEGATRON_TRAIN = ("c4-train.en_6_text_document", "c4-train.en_7_text_document")
MEGATRON_HELD_OUT = "c4-validation-91205-samples.en_text_document"
_TRAIN = re.compile(r"c4-train\.(\d{5})-of-01024\.json(\.gz)?")
_HELD_OUT = re.compile(r"c4-validation\.0000[0-7]-of-00008\.json(\.gz)?")
_HELD_OUT_READY = re.compile(r"c4-validation-91205-samples\.en\.json(\.gz)?")
_BATCH = 256


@dataclass(frozen=True)
class TextPart:
    """JSON lines with a "text" each -> one part."""

    split: str
    name: str
    inputs: tuple[Path, ...]
    limit: int | None = None
    """Lines after which to stop."""
    masked: bool = False
    seq_len: int | None = None

    def write(self, writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
        """See `Job`."""
        lines, texts = 0, []
        for path in self.inputs:
            before = lines
            for number, row in json_lines(path, report):
                texts.append(text_of(row, "text", path, number))
                lines += 1
                if len(texts) == _BATCH:
                    _encode(texts, writer, tokenizer, report)
                    texts = []
                if lines == self.limit:
                    break
            if lines == before:
                raise UserError(f"{path} holds no document; fetch the file again")
            if lines == self.limit:
                break
        _encode(texts, writer, tokenizer, report)


def jobs(directory: Path) -> list[Job]:
    """The parts to make from a directory of C4 files. Raises UserError saying which are missing."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    train = _train(directory, names)
    if not train:
        raise UserError(
            f"{directory} has no C4 training file: needed are c4-train.{FIRST_SHARD:05d}-of-01024.json.gz "
            f"to c4-train.{LAST_SHARD:05d}-of-01024.json.gz, or {MEGATRON_TRAIN[0]}.bin and .idx"
        )
    heldout = _heldout(directory, names)
    if not heldout:
        raise UserError(
            f"{directory} has no C4 validation file: needed are c4-validation.00000-of-00008.json.gz "
            f"to .00007, or {MEGATRON_HELD_OUT}.bin and .idx"
        )
    return [*train, *heldout]


def notes(found: list[Job]) -> tuple[str, list[str]]:
    """How much of the official sets these jobs read, one line, and warnings where it is no whole one."""
    train, heldout = ([job for job in found if job.split == split] for split in ("train", "heldout"))
    names = {job.name for job in train}
    if isinstance(train[0], MegatronPart):
        what = f"{len(train)} of {len(MEGATRON_TRAIN)} tokenized training files: {', '.join(sorted(names))}"
        small, large = set(MEGATRON_TRAIN[:1]), set(MEGATRON_TRAIN)
    else:
        small, large = (
            {f"{shard:05d}" for shard in range(FIRST_SHARD, last + 1)} for last in (LAST_SHARD_8B, LAST_SHARD)
        )
        what = (
            f"{len(names & small)} of the {len(small)} training files of llama31_8b ({min(small)} to {max(small)}), "
            f"{len(names)} of the {len(large)} of llama31_405b (to {max(large)})"
        )
    whole = [name for name, needed in (("llama31_8b", small), ("llama31_405b", large)) if needed <= names]
    warnings = []
    if not whole:
        warnings.append("no benchmark's training set is whole; a run on a part of it is no MLPerf result")
    validation = heldout[0].inputs
    if _HELD_OUT.fullmatch(validation[0].name) and len(validation) < HELD_OUT_SHARDS:
        warnings.append(
            f"{len(validation)} of the {HELD_OUT_SHARDS} validation files: the official {HELD_OUT_DOCUMENTS:,} "
            "documents are the first of all, in order; a run on others is no MLPerf result"
        )
    verdict = f"; whole for {' and '.join(whole)}" if whole else ""
    return f"found {what}{verdict}", warnings


def _train(directory: Path, names: list[str]) -> list[Job]:
    found: dict[int, Path] = {}
    for name in names:
        match = _TRAIN.fullmatch(name)
        if match and FIRST_SHARD <= int(match[1]) <= LAST_SHARD:
            found.setdefault(int(match[1]), directory / name)
    if found:
        return [TextPart("train", f"{shard:05d}", (path,)) for shard, path in sorted(found.items())]
    return [
        MegatronPart("train", prefix, (directory / f"{prefix}.bin", directory / f"{prefix}.idx"))
        for prefix in MEGATRON_TRAIN
        if f"{prefix}.bin" in names
    ]


def _heldout(directory: Path, names: list[str]) -> list[Job]:
    ready = [name for name in names if _HELD_OUT_READY.fullmatch(name)]
    if ready:
        return [TextPart("heldout", "validation", (directory / ready[0],), HELD_OUT_DOCUMENTS)]
    if whole := tuple(directory / name for name in names if _HELD_OUT.fullmatch(name)):
        return [TextPart("heldout", "validation", whole, HELD_OUT_DOCUMENTS)]
    if f"{MEGATRON_HELD_OUT}.bin" in names:
        files = (directory / f"{MEGATRON_HELD_OUT}.bin", directory / f"{MEGATRON_HELD_OUT}.idx")
        return [MegatronPart("heldout", "validation", files)]
    return []


def _encode(texts: list[str], writer: PartWriter, tokenizer: Tokenizer, report: Report) -> None:
    documents = [ids for ids in tokenizer.encode_batch(texts) if len(ids)]
    if documents:
        ids = np.concatenate(documents)
        writer.add(ids, lengths=np.array([len(d) for d in documents]))
        report(0, len(documents), len(ids))
