"""Ranks and micro-batches whose sequences share prompts: the invariants of ``assign``, and what is
saved."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.batching.packing import assign, cost
from rlmath.batching.shards import ShardSettings, shards
from rlmath.batching.shared_prompts import GroupedSequences, assign_sharing
from rlmath.types import TrainingBatch


def check_invariants(sequences, ranks, budget, multiple_of=1):
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
def test_invariants(drawn, data_parallel, budget, multiple_of):
    # Two lengths of a prompt in each group.
    prompts = [1 + (group * 17) % 40 + (which > 50) for group, which, _ in drawn]
    lengths = [prompt + response for prompt, (_, _, response) in zip(prompts, drawn, strict=True)]
    sequences = GroupedSequences(lengths, [group for group, _, _ in drawn], prompts)
    if len(drawn) < data_parallel:
        with pytest.raises(ValueError, match=r"cannot be split over data_parallel"):
            assign_sharing(sequences, data_parallel, budget)
        return
    ranks = assign_sharing(sequences, data_parallel, budget, multiple_of=multiple_of)
    check_invariants(sequences, ranks, budget, multiple_of)
    assert ranks == assign_sharing(sequences, data_parallel, budget, multiple_of=multiple_of)


def test_with_nothing_to_share_it_is_assign():
    lengths = [random.Random(2).randint(2, 300) for _ in range(50)]
    sequences = GroupedSequences(lengths, range(50), [1] * 50)
    assert assign_sharing(sequences, 3, 700) == assign(lengths, 3, 700)


def test_a_group_above_the_budget_is_split():
    sequences = GroupedSequences([60] * 8, [0] * 8, [21] * 8)
    ranks = assign_sharing(sequences, 1, 200)
    check_invariants(sequences, ranks, 200)
    # Of 4: 240 - 3 x 15 = 195, and of 5 it would be 240.
    assert [len(m.sequences) for m in ranks[0]] == [4, 4]


def test_no_micro_batch_is_empty_while_a_group_can_be_split():
    sequences = GroupedSequences([60] * 4, [0] * 4, [50] * 4)
    (rank,) = assign_sharing(sequences, 1, 1000, multiple_of=2)
    assert [len(m.sequences) for m in rank] == [2, 2]


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
        check_invariants(sequences, dealt, 2048)
        loads = [sum(sequences.cost(m.sequences) for m in rank) for rank in dealt]
        usual = assign(sequences.lengths, ranks, 2048)
        before = [sum(cost(sequences.lengths[i]) for m in r for i in m.sequences) for r in usual]
        assert max(loads) <= imbalance * sum(loads) / ranks
        assert max(loads) < share * max(before)


def test_shards_keep_groups_together_where_prompts_are_shared():
    responses = torch.full((64,), 64)
    batch = TrainingBatch(
        tokens=torch.zeros(64 * 82, dtype=torch.int64),
        prompt_lengths=torch.full((64,), 18),
        response_lengths=responses,
        group_ids=torch.arange(64) % 8,
        weights_versions=torch.zeros(64, dtype=torch.int64),
        rewards=torch.zeros(64),
        engine_log_probs=torch.zeros(64 * 64),
        loss_mask=torch.ones(64 * 64, dtype=torch.bool),
    )
    for one in shards(batch, ShardSettings(2, 2048, minibatches=2, share_prompts=True)):
        assert len(one.counts) == 2 and len(one.batch) == 32
        for half in one.batch.group_ids.split(16):
            assert len(half.unique_consecutive()) == 2
