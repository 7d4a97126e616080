"""Ranks and micro-batches: the invariants that ``batching/packing.py`` opens with."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.batching import assign, cost


def check_invariants(lengths, data_parallel, budget, multiple_of=1):
    ranks = assign(lengths, data_parallel, budget, multiple_of=multiple_of)
    assert len(ranks) == data_parallel
    assert sorted(i for r in ranks for m in r for i in m.sequences) == list(range(len(lengths)))
    count = len(ranks[0])
    assert all(len(r) == count for r in ranks)
    assert count % multiple_of == 0
    for rank in ranks:
        assert any(m.sequences for m in rank)
        for m in rank:
            assert m.num_tokens == sum(lengths[i] for i in m.sequences)
            assert m.num_tokens <= budget or len(m.sequences) == 1
    if len(lengths) >= data_parallel * count:
        assert all(m.sequences for r in ranks for m in r)
    return ranks


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(1, 500),
    st.integers(1, 3),
)
def test_invariants(lengths, data_parallel, budget, multiple_of):
    if len(lengths) >= data_parallel:
        check_invariants(lengths, data_parallel, budget, multiple_of)


def test_a_sequence_over_the_budget_is_alone():
    ranks = check_invariants([100, 10, 10, 10], 1, 30)
    assert [(m.sequences, m.num_tokens) for m in ranks[0]] == [((0,), 100), ((1, 2, 3), 30)]


def test_a_rank_with_few_long_sequences_gets_short_ones_to_fill_its_microbatches():
    # By cost alone the rank with the sequence of 100 would have one sequence and the other one
    # ten in two micro-batches.
    ranks = check_invariants([100, *[10] * 10], 2, 50)
    assert all(m.sequences for r in ranks for m in r)


def test_a_packing_that_even_loads_would_miss_is_found():
    # Longest first to the emptiest: 3 2 2 | 3 2, over 6. Two micro-batches of 6 do exist.
    ranks = check_invariants([3, 3, 2, 2, 2], 1, 6)
    assert [m.num_tokens for m in ranks[0]] == [6, 6]


def test_too_few_sequences_for_the_count_leave_empty_microbatches_at_the_end():
    ranks = check_invariants([60, 60, 60], 2, 50)
    assert [[m.sequences for m in r] for r in ranks] == [[(0,), (2,)], [(1,), ()]]


def test_the_most_expensive_microbatch_comes_first():
    lengths = [random.Random(1).randint(1, 900) for _ in range(64)]
    for rank in assign(lengths, 2, 1000):
        costs = [sum(cost(lengths[i]) for i in m.sequences) for m in rank]
        assert costs == sorted(costs, reverse=True)


def test_cost_doubles_at_the_break_even_length():
    assert cost(1000, attention_break_even_tokens=1000) == 2000
    assert cost(1) == pytest.approx(1.0, rel=1e-4)


def test_fewer_sequences_than_ranks_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"3 sequences .* data_parallel = 4 .* 1 of them"):
        assign([5, 5, 5], 4, 10)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (([1], 0, 1), "data_parallel = 0"),
        (([1], 1, 0), "max_tokens_per_microbatch = 0"),
        (([3, 0], 1, 9), "sequence 1 has 0 tokens"),
    ],
)
def test_impossible_numbers_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        assign(*arguments)


@pytest.mark.parametrize("data_parallel", [1, 32])
def test_sixteen_thousand_sequences_balance(data_parallel):
    rng = random.Random(0)
    lengths = [min(28672, max(60, int(rng.lognormvariate(8.5, 0.8)))) for _ in range(16384)]
    budget = 32768
    ranks = assign(lengths, data_parallel, budget)
    loads = [sum(cost(lengths[i]) for m in r for i in m.sequences) for r in ranks]
    assert max(loads) <= 1.001 * sum(loads) / data_parallel
    fewest = -(-sum(lengths) // (budget * data_parallel))
    assert len(ranks[0]) <= fewest + 1
