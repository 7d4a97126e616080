"""Minibatches: equal sizes, whole groups where possible, independent of the samples' order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.batching import minibatches


def test_groups_stay_whole_when_the_number_of_groups_divides():
    group_ids = [g for g in range(8) for _ in range(4)]
    cut = minibatches(group_ids, 4, seed=1)
    assert [len(m) for m in cut] == [8, 8, 8, 8]
    groups = [{group_ids[i] for i in m} for m in cut]
    assert all(len(g) == 2 for g in groups)
    assert set.union(*groups) == set(range(8))


def test_without_groups_a_range_will_do():
    cut = minibatches(range(10), 3, seed=0)
    assert [len(m) for m in cut] == [3, 3, 4]
    assert sorted(i for m in cut for i in m) == list(range(10))


def test_the_seed_decides():
    assert minibatches(range(50), 5, 7) == minibatches(range(50), 5, 7)
    assert minibatches(range(50), 5, 7) != minibatches(range(50), 5, 8)


def test_the_order_of_samples_makes_no_difference():
    group_ids = [g for g in range(12) for _ in range(3)]
    shuffled = group_ids[:]
    random.Random(3).shuffle(shuffled)
    of = lambda ids: [sorted(ids[i] for i in m) for m in minibatches(ids, 4, seed=5)]  # noqa: E731
    assert of(group_ids) == of(shuffled)


def test_fewer_sequences_than_minibatches_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"3 sequences .* = 4 minibatches.*at most 3"):
        minibatches([0, 0, 1], 4, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        minibatches([0], 0, seed=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 999))
def test_every_sequence_once_sizes_within_one_and_few_groups_split(group_ids, k, seed):
    if len(group_ids) < k:
        return
    cut = minibatches(group_ids, k, seed)
    assert sorted(i for m in cut for i in m) == list(range(len(group_ids)))
    sizes = [len(m) for m in cut]
    assert max(sizes) - min(sizes) <= 1
    seen = [g for m in cut for g in {group_ids[i] for i in m}]
    assert len(seen) - len(set(seen)) <= k - 1
