"""The loader: the same samples at every data parallel size, exact resume, errors and shutdown."""

import threading

import numpy as np
import pytest
import torch

from timetrial.data.loader import Loader, eval_batches
from timetrial.data.order import Order
from timetrial.data.samples import IGNORE
from timetrial.errors import UserError


class Numbered:
    """Sample i is filled with i."""

    def __init__(self, n, fail_at=None):
        self.n, self.fail_at, self.read = n, fail_at, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.fail_at:
            raise OSError(f"disk gone at {i}")
        self.read.append(i)
        return {"tokens": np.full(4, i, dtype=np.int64), "labels": np.full(4, i + 1, dtype=np.int64)}


def steps(n_steps, samples=None, **options):
    """[step][micro batch] -> list of sample numbers."""
    options = {"seed": 11, "gbs": 12, "mbs": 2, **options}
    with Loader(samples or Numbered(100), **options) as loader:
        return [[batch["tokens"][:, 0].tolist() for batch in next(loader)] for _ in range(n_steps)]


def flat(step):
    return [i for batch in step for i in batch]


def test_one_rank_reads_the_order_step_by_step():
    order = Order(100, 11)
    for k, step in enumerate(steps(20)):  # 240 samples: more than two epochs
        assert flat(step) == order.indices(k * 12, (k + 1) * 12).tolist()
        assert [len(batch) for batch in step] == [2] * 6


@pytest.mark.parametrize(("dp", "mbs"), [(2, 2), (2, 3), (3, 4), (6, 1), (12, 1)])
def test_ranks_together_read_what_one_rank_reads(dp, mbs):
    whole = steps(10)
    parts = [steps(10, mbs=mbs, dp_rank=r, dp_size=dp) for r in range(dp)]
    for k in range(10):
        assert [i for r in range(dp) for i in flat(parts[r][k])] == flat(whole[k])


def test_a_rank_touches_only_its_own_samples():
    samples = Numbered(1000)
    mine = steps(3, samples, dp_rank=1, dp_size=3)
    assert samples.read[:12] == [i for step in mine for i in flat(step)]


def test_resume_goes_on_at_the_exact_sample():
    whole = steps(15)
    for k in (1, 8, 9):  # inside and just past the first epoch
        assert steps(15 - k, start_sample=12 * k) == whole[k:]


def test_batches_are_int64_tensors_and_indices_are_kept():
    with Loader(Numbered(50), seed=1, gbs=4, mbs=2) as loader:
        for _ in range(3):
            batches = next(loader)
            assert batches[0]["labels"].dtype == torch.int64
            assert batches[0]["labels"].shape == (2, 4)
            assert torch.equal(batches[0]["labels"], batches[0]["tokens"] + 1)
            assert loader.last_indices.tolist() == [i for b in batches for i in b["tokens"][:, 0].tolist()]
            assert loader.wait_s >= 0


def test_reading_error_reaches_the_consumer_and_stays():
    bad = Order(100, 11).sample_index(30)
    with Loader(Numbered(100, fail_at=bad), seed=11, gbs=12, mbs=2) as loader:
        next(loader), next(loader)
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(loader)


def test_close_joins_the_thread_wherever_it_waits():
    before = threading.active_count()
    loader = Loader(Numbered(100), seed=1, gbs=4, mbs=2)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_impossible_batches_are_refused():
    with pytest.raises(UserError, match="global batch 10 is no multiple of micro batch 4 x data parallel 2"):
        Loader(Numbered(9), seed=1, gbs=10, mbs=4, dp_size=2)
    with pytest.raises(UserError, match="30 consumed samples"):
        Loader(Numbered(9), seed=1, gbs=8, mbs=4, start_sample=30)
    with pytest.raises(UserError, match="no sample"):
        Loader(Numbered(0), seed=1, gbs=8, mbs=4)


@pytest.mark.parametrize(("count", "mbs", "dp"), [(10, 4, 1), (10, 4, 2), (9, 4, 2), (7, 2, 3), (2, 4, 4), (5, 1, 4)])
@pytest.mark.parametrize("pad", [False, True])
def test_evaluation_reads_exactly_the_first_samples_once(count, mbs, dp, pad):
    seen, batches = [], []
    for rank in range(dp):
        got = list(eval_batches(Numbered(20), count, mbs, rank, dp, pad))
        batches.append(len(got))
        for batch in got:
            assert len(batch["tokens"]) <= mbs
            assert not pad or len(batch["tokens"]) == mbs
            counted = (batch["labels"] != IGNORE).all(dim=1)
            seen += batch["tokens"][counted, 0].tolist()
            assert counted.any() or (batch["labels"] == IGNORE).all()
    assert seen == list(range(count))
    assert len(set(batches)) == 1  # collectives in the forward pass must match


def test_evaluation_set_that_is_too_small_is_refused():
    with pytest.raises(UserError, match="needs 21 held-out samples, the data has 20"):
        next(eval_batches(Numbered(20), 21, 4))
