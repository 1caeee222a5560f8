"""Pairs packed as the LoRA reference packs them, and the bundled synopses."""

import numpy as np
import pytest

from timetrial.config import Data
from timetrial.data import bundled, cache, packing
from timetrial.data.bundled import Pair
from timetrial.data.packing import Row, pack, tokenize
from timetrial.data.source import open_source
from timetrial.data.tokenizer import bundled_tokenizer
from timetrial.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_of(lengths):
    """Row k is `length` times the number k."""
    return [Row(np.full(n, k), np.ones(n, dtype=bool)) for k, n in enumerate(lengths)]


def by_the_reference(rows, seq_len, num_proc):
    """An independent reading of the reference: filter, contiguous shards, batches of 1,000, group_texts."""
    kept = [r for r in rows if not len(r.ids) > seq_len]
    out = []
    for shard in np.array_split(np.arange(len(kept)), num_proc):  # same rule as Dataset.shard(contiguous=True)
        for i in range(0, len(shard), 1000):
            chain = [int(t) for j in shard[i : i + 1000] for t in kept[j].ids]
            total = (len(chain) // seq_len) * seq_len
            out += [chain[k : k + seq_len] for k in range(0, total, seq_len)]
    return out


@pytest.mark.parametrize(("count", "shards"), [(50, 8), (50, 2), (40, 8), (2500, 2), (1003, 1)])
def test_packing_equals_an_independent_reading_of_the_reference(count, shards):
    lengths = np.random.default_rng(count).integers(1, 40, count)
    rows = rows_of(lengths)
    packed = pack(rows, 32, shards)
    assert packed.ids.reshape(-1, 32).tolist() == by_the_reference(rows, 32, shards)


def test_no_pair_that_fits_is_an_error():
    with pytest.raises(UserError, match=r"no pair fits 8 tokens.*raise data.seq_len"):
        pack(rows_of([20, 30]), 8, 2)


def test_loss_is_on_everything_in_training_and_on_the_summary_in_evaluation():
    tok = bundled_tokenizer()
    pair = Pair("n", "The state of the union is strong.", "Strong union.")
    train, evaluation = tokenize(pair, tok, summary_only=False), tokenize(pair, tok, summary_only=True)
    assert train.ids.tolist() == evaluation.ids.tolist()
    assert train.learnt.all()
    assert train.ids[0] == tok.bos_id
    assert train.ids[-1] == tok.eos_id
    text = "### Summarize the following text:\n The state of the union is strong.\n ### Summary:\n Strong union."
    assert tok.decode(train.ids) == text
    assert tok.decode(evaluation.ids[evaluation.learnt]) == " Strong union."


def test_synopses_are_real_pairs_each_once():
    pairs = bundled.pairs("synopses")
    assert len(pairs) == bundled.sources()["synopses"]["items"] == 3124
    assert len({p.text for p in pairs}) == len({p.summary for p in pairs}) == len({p.name for p in pairs}) == 3124
    shift = next(p for p in pairs if p.name == "scipy.fft._helper.fftshift")
    assert shift.summary == "Shift the zero-frequency component to the center of the spectrum."
    assert shift.text.startswith("This function swaps half-spaces for all axes listed")


@pytest.mark.parametrize(("seq_len", "counts"), [(256, (1403, 75)), (512, (1029, 53))])
def test_synopses_source(seq_len, counts):
    source = open_source(Data(source="synopses", seq_len=seq_len))
    assert (len(source.train), len(source.heldout)) == counts
    tok = source.tokenizer
    sample = source.train[3]
    assert sample["labels"].tolist() == [*sample["tokens"][1:].tolist(), -100]
    learnt = [s["labels"][s["labels"] != -100] for s in (source.heldout[i] for i in range(counts[1]))]
    assert min(map(len, learnt)) > 0
    assert not np.isin(np.concatenate(learnt), [tok.bos_id, tok.eos_id]).any()
    heldout = bundled.split(bundled.pairs("synopses"))[1]
    text = tok.decode(np.concatenate(learnt))
    assert sum(p.summary in text for p in heldout) > 0.5 * len(heldout)  # cut ones and dropped pairs miss


def test_cache_is_used_repaired_and_optional(tmp_path, monkeypatch):
    tok, calls = bundled_tokenizer(), []

    def make():
        calls.append(1)
        return packing.ArrayTokens(np.arange(10), np.arange(10) > 4)

    def read(tokens):
        return tokens.read(0, 10).tolist(), tokens.read_mask(3, 7).tolist()

    expected = (list(range(10)), [False, False, True, True])
    assert read(cache.cached_tokens("t", ["a"], tok, make)) == expected
    assert read(cache.cached_tokens("t", ["a"], tok, make)) == expected
    assert len(calls) == 1
    cache.cached_tokens("t", ["b"], tok, make)  # anything else that decides it makes another entry
    assert len(calls) == 2
    for path in (tmp_path / "cache").rglob("all.bin"):
        path.write_bytes(bytes(reversed(path.read_bytes())))
    assert read(cache.cached_tokens("t", ["a"], tok, make)) == expected
    assert len(calls) == 3
    assert read(cache.cached_tokens("t", ["a"], tok, make)) == expected
    assert len(calls) == 3  # repaired
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read(cache.cached_tokens("t", ["a"], tok, make)) == expected
    assert not list((tmp_path / "cache").rglob("*.tmp"))
