"""Fine-tuning pairs packed to one length, as the LoRA reference packs GovReport.

From mlcommons/training `llama2_70b_lora/scripts/utils.py` (`create_datasets`, `group_texts`):

1. A pair becomes one text: prompt, document, separator, summary, end token; the tokenizer puts its
   begin token in front.
2. In training every token carries loss. In evaluation only the summary does: as many tokens as the
   text up to the separator has by itself are left out, and so is the end token.
3. Pairs longer than the sequence length are dropped, not cut.
4. The rest is strung together and cut into sequences; a pair may run over a cut, and attention does
   not stop between pairs. There is no padding: the tokens left over at the end of each batch of
   1,000 pairs, in each of the worker processes of `datasets.map` (8 in training, 2 in validation),
   are dropped. That loses up to a sequence per batch, and is part of which sequences there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from timetrial.data.bundled import Pair
from timetrial.data.samples import ArrayTokens
from timetrial.data.tokenizer import Tokenizer
from timetrial.errors import UserError

TRAIN_SHARDS, HELD_OUT_SHARDS = 8, 2
"""`num_proc` of the reference's packing."""
BATCH = 1000
"""Default `batch_size` of `datasets.map`."""


@dataclass(frozen=True)
class Row:
    """One tokenized pair."""

    ids: np.ndarray
    learnt: np.ndarray
    """bool, as long as `ids`: which tokens carry loss."""


def prompt(text: str) -> str:
    """What stands before the summary: the reference's wording, to the letter."""
    return f"### Summarize the following text:\n {text}\n ### Summary:\n"


def tokenize(pair: Pair, tokenizer: Tokenizer, summary_only: bool) -> Row:
    """One pair as ids. `summary_only` is evaluation: loss on the summary alone."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    head = prompt(pair.text)
    ids = np.concatenate([begin, tokenizer.encode(f"{head} {pair.summary}"), [tokenizer.eos_id]]).astype(np.int64)
    learnt = np.ones(len(ids), dtype=bool)
    if summary_only:
        learnt[: len(begin) + len(tokenizer.encode(head))] = False
        learnt[-1] = False
    return Row(ids, learnt)


def pack(rows: Iterable[Row], seq_len: int, shards: int) -> ArrayTokens:
    """All sequences in a row: ids and mask [sequences * seq_len].

    Raises UserError when no pair fits.
    """
    kept = [row for row in rows if len(row.ids) <= seq_len]
    groups = [group for shard in _shards(kept, shards) for group in _batches(shard)]
    ids = [_whole(np.concatenate([row.ids for row in group]), seq_len) for group in groups]
    mask = [_whole(np.concatenate([row.learnt for row in group]), seq_len) for group in groups]
    if not sum(map(len, ids)):
        raise UserError(f"no pair fits {seq_len} tokens, or all together do not fill one sequence; raise data.seq_len")
    return ArrayTokens(np.concatenate(ids), np.concatenate(mask))


def _shards(rows: list[Row], count: int) -> Iterator[list[Row]]:
    """Contiguous shares, the first ones larger by one where it does not divide, as `datasets` splits."""
    count = max(1, min(count, len(rows)))
    size, extra = divmod(len(rows), count)
    for i in range(count):
        start = size * i + min(i, extra)
        yield rows[start : start + size + (i < extra)]


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    for i in range(0, len(rows), BATCH):
        yield rows[i : i + BATCH]


def _whole(values: np.ndarray, seq_len: int) -> np.ndarray:
    return values[: len(values) // seq_len * seq_len]
