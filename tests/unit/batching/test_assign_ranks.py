"""Sequences on ranks, in minibatches and micro-batches, with and without shared prompts."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.batching import minibatches
from rlmath.batching.packing import assign, cost
from rlmath.batching.shards import ShardSettings, shards
from rlmath.batching.shared_prompts import GroupedSequences, assign_sharing
from tests.support.batches import batch_of_lengths


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
def test_assign_ranks_invariants(lengths, data_parallel, budget, multiple_of):
    if len(lengths) >= data_parallel:
        check_invariants(lengths, data_parallel, budget, multiple_of)


def test_a_rank_with_few_long_sequences_gets_short_ones_to_fill_its_microbatches():
    # By cost alone the rank with the sequence of 100 would have one sequence and the other one
    # ten in two micro-batches.
    ranks = check_invariants([100, *[10] * 10], 2, 50)
    assert all(m.sequences for r in ranks for m in r)


def test_a_packing_that_even_loads_would_miss_is_found():
    # Longest first to the emptiest: 3 2 2 | 3 2, over 6. Two micro-batches of 6 do exist.
    ranks = check_invariants([3, 3, 2, 2, 2], 1, 6)
    assert [m.num_tokens for m in ranks[0]] == [6, 6]


def test_the_most_expensive_microbatch_comes_first():
    lengths = [random.Random(1).randint(1, 900) for _ in range(64)]
    for rank in assign(lengths, 2, 1000):
        costs = [sum(cost(lengths[i]) for i in m.sequences) for m in rank]
        assert costs == sorted(costs, reverse=True)


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


def check_sharing(sequences, ranks, budget, multiple_of=1):
    lengths = sequences.lengths
    assert sorted(i for r in ranks for m in r for i in m.sequences) == list(range(len(lengths)))
    count = len(ranks[0])
    assert all(len(rank) == count for rank in ranks) and count % multiple_of == 0
    for rank in ranks:
        assert any(m.sequences for m in rank)
        costs = [sequences.cost(m.sequences) for m in rank]
        assert costs == sorted(costs, reverse=True)
        for m in rank:
            assert m.num_tokens == sum(lengths[i] for i in m.sequences)
            assert sequences.tokens(m.sequences) <= budget or len(m.sequences) == 1
            # Sequences with one prompt are next to each other.
            prompts = [(sequences.group_ids[i], sequences.prompt_lengths[i]) for i in m.sequences]
            changes = sum(a != b for a, b in itertools.pairwise(prompts))
            assert changes == max(len(set(prompts)) - 1, 0)
    if len(lengths) >= len(ranks) * count:
        assert all(m.sequences for r in ranks for m in r)


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 200)),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 8),
    st.integers(1, 500),
    st.integers(1, 3),
)
def test_invariants_with_shared_prompts(drawn, data_parallel, budget, multiple_of):
    # Two lengths of a prompt in each group.
    prompts = [1 + (group * 17) % 40 + (which > 50) for group, which, _ in drawn]
    lengths = [prompt + response for prompt, (_, _, response) in zip(prompts, drawn, strict=True)]
    sequences = GroupedSequences(lengths, [group for group, _, _ in drawn], prompts)
    if len(drawn) < data_parallel:
        with pytest.raises(ValueError, match=r"cannot be split over data_parallel"):
            assign_sharing(sequences, data_parallel, budget)
        return
    ranks = assign_sharing(sequences, data_parallel, budget, multiple_of=multiple_of)
    check_sharing(sequences, ranks, budget, multiple_of)
    assert ranks == assign_sharing(sequences, data_parallel, budget, multiple_of=multiple_of)


def test_a_group_above_the_budget_is_split():
    sequences = GroupedSequences([60] * 8, [0] * 8, [21] * 8)
    ranks = assign_sharing(sequences, 1, 200)
    check_sharing(sequences, ranks, 200)
    # 4 sequences: 240 - 3 x 15 = 195; 5 would make 240.
    assert [len(m.sequences) for m in ranks[0]] == [4, 4]


def test_groups_that_come_mixed_are_next_to_each_other():
    sequences = GroupedSequences([10] * 6, [0, 1, 0, 1, 0, 1], [5, 5, 4, 5, 5, 5])
    ((one,),) = assign_sharing(sequences, 1, 1000)
    assert one.sequences == (0, 4, 1, 3, 5, 2)


def test_copies_count_against_the_budget():
    # Attention has a copy of the prompt for each sequence: 64 in one micro-batch would be 64,000
    # keys.
    sequences = GroupedSequences([1010] * 64, [0] * 64, [1001] * 64)
    (rank,) = assign_sharing(sequences, 1, 4000)
    assert max(len(m.sequences) for m in rank) <= 12


def uneven(groups, size, prompt, longest, seed):
    rng = random.Random(seed)
    responses = [
        min(longest, 1 + int(rng.expovariate(1.7 / longest))) for _ in range(groups * size)
    ]
    return GroupedSequences(
        [prompt + response for response in responses],
        [i // size for i in range(groups * size)],
        [prompt] * (groups * size),
    )


@pytest.mark.parametrize(("ranks", "imbalance", "share"), [(2, 1.01, 0.95), (8, 1.05, 0.99)])
def test_ranks_are_about_equal_and_have_less_to_do(ranks, imbalance, share):
    for seed in range(5):
        sequences = uneven(16, 8, 18, 256, seed)
        dealt = assign_sharing(sequences, ranks, 2048)
        check_sharing(sequences, dealt, 2048)
        loads = [sum(sequences.cost(m.sequences) for m in rank) for rank in dealt]
        usual = assign(sequences.lengths, ranks, 2048)
        before = [sum(cost(sequences.lengths[i]) for m in r for i in m.sequences) for r in usual]
        assert max(loads) <= imbalance * sum(loads) / ranks
        assert max(loads) < share * max(before)


def test_shards_keep_groups_together_where_prompts_are_shared():
    batch = batch_of_lengths([18] * 64, [64] * 64, group_ids=torch.arange(64) % 8)
    for one in shards(batch, ShardSettings(2, 2048, minibatches=2, share_prompts=True)):
        assert len(one.counts) == 2 and len(one.batch) == 32
        for half in one.batch.group_ids.split(16):
            assert len(half.unique_consecutive()) == 2


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
