"""The stateless shuffle: a permutation for every size, uniform, different per epoch and seed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timetrial.data.order import Order, permute


def chi_square_tail(observed, expected, freedom):
    """P(larger chi-square), by Wilson and Hilferty's cube root (1931)."""
    statistic = ((np.asarray(observed) - expected) ** 2 / expected).sum()
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 255, 256, 257, 65_536, 65_537, 1_000_003])
def test_permutation_at_the_edges_of_the_grid(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, 7, 0)), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2, 10**12), seed=st.integers(0, 1000), data=st.data())
def test_large_sizes_need_no_memory_and_do_not_collide(n, seed, data):
    some = np.unique(np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50))))
    out = permute(some, n, seed, 3)
    assert len(np.unique(out)) == len(some)
    assert out.min() >= 0
    assert out.max() < n
    assert permute(some[:1], n, seed, 3)[0] == out[0]  # one at a time gives the same


def test_epochs_and_seeds_differ():
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert (first == second).sum() < 15  # a random pair agrees in one place on average


@pytest.mark.parametrize("n", [2, 3, 10, 37])
def test_every_sample_lands_everywhere_equally_often(n):
    runs = 4000
    table = np.zeros((n, n))
    for seed in range(runs):
        table[np.arange(n), permute(np.arange(n), n, seed, 0)] += 1
    assert chi_square_tail(table, runs / n, (n - 1) ** 2) > 1e-4


def test_neighbours_are_not_correlated():
    out = permute(np.arange(100_000), 100_000, 5, 0)
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.015  # 4.7 standard errors
    counts, _ = np.histogram(np.diff(out) % 100_000, bins=50)
    assert chi_square_tail(counts, counts.mean(), 49) > 1e-4


def test_order_runs_on_over_epochs():
    order = Order(10, seed=3)
    whole = order.indices(0, 35)
    assert [sorted(whole[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert whole[:10].tolist() != whole[10:20].tolist()
    assert [order.sample_index(p) for p in range(35)] == whole.tolist()
    assert order.indices(17, 23).tolist() == whole[17:23].tolist()
    assert (order.epoch(9), order.epoch(10)) == (0, 1)


def test_order_never_changes_between_versions():
    assert Order(1000, seed=1).indices(0, 5).tolist() == [135, 308, 164, 309, 319]


def test_indices_outside_are_refused():
    with pytest.raises(ValueError, match="must lie in"):
        permute(np.array([5]), 5, 0, 0)
