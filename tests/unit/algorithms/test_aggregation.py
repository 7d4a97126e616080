"""Aggregation: weights by hand, against loops, and that cutting the batch changes nothing."""

import plain_algorithms as plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms.aggregation import AGGREGATIONS, denominator, sequence_weights

KINDS = AGGREGATIONS.names()


def weights(kind, mask, lengths, groups):
    counts = [sum(row) for row in torch.tensor(mask).split(lengths)]
    found = sequence_weights(kind, torch.tensor(counts), torch.tensor(groups), 10)
    of_tokens = torch.repeat_interleave(found, torch.tensor(lengths))
    return (of_tokens * torch.tensor(mask)).tolist()


# Two sequences of one prompt (2 and 1 tokens), one of another (3 tokens, one of them masked).
CASE = ([1, 1, 1, 1, 0, 1], [2, 1, 3], [7, 7, 4])


@pytest.mark.parametrize(
    "kind, want",
    [
        ("token_mean", [1 / 5, 1 / 5, 1 / 5, 1 / 5, 0, 1 / 5]),
        ("seq_mean_token_mean", [1 / 6, 1 / 6, 1 / 3, 1 / 6, 0, 1 / 6]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3, 1 / 3, 0, 1 / 3]),
        ("seq_sum_constant", [1 / 30, 1 / 30, 1 / 30, 1 / 30, 0, 1 / 30]),
        ("prompt_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 4, 0, 1 / 4]),
    ],
)
def test_by_hand(kind, want):
    assert weights(kind, *CASE) == pytest.approx(want, rel=1e-14)


BATCH = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@given(BATCH)
def test_agrees_with_loops(kind, batch):
    mask = [m for row, _ in batch for m in row]
    lengths, groups = [len(row) for row, _ in batch], [g for _, g in batch]
    want = plain.token_weights(kind, mask, lengths, groups, 10)
    assert weights(kind, mask, lengths, groups) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
@given(BATCH)
def test_means_weigh_one_in_all_or_nothing_is_unmasked(kind, batch):
    mask = [m for row, _ in batch for m in row]
    total = sum(weights(kind, mask, [len(row) for row, _ in batch], [g for _, g in batch]))
    assert total == pytest.approx(1.0 if any(mask) else 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_a_token_in_the_loss_are_not_counted(kind):
    mask, lengths, groups = CASE
    assert weights(kind, [*mask, 0, 0], [*lengths, 2], [*groups, 9])[:6] == weights(kind, *CASE)


def test_errors_name_what_is_wrong():
    three, one = torch.tensor([3]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"aggregation = 'mean'.*token_mean"):
        sequence_weights("mean", three, one)
    with pytest.raises(ValueError, match="2 sequences, but 1 group_ids"):
        sequence_weights("token_mean", torch.tensor([2, 1]), one)
    with pytest.raises(ValueError, match=r"constant_length.*None.*max_response_tokens"):
        sequence_weights("seq_sum_constant", three, one)


@pytest.mark.parametrize("kind", KINDS)
@given(BATCH, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_parts_of_whole_groups_need_only_their_own_lengths(kind, batch, part_of_group):
    counts = torch.tensor([sum(row) for row, _ in batch])
    groups = torch.tensor([group for _, group in batch])
    whole = denominator(kind, counts, groups)
    wanted = sequence_weights(kind, counts, groups, 10)
    parts = torch.tensor(part_of_group)[groups]
    total = 0.0
    for part in range(3):
        own = parts == part
        if not own.any():
            continue
        share = denominator(kind, counts[own], groups[own])
        found = sequence_weights(kind, counts[own], groups[own], 10) * share / max(whole, 1)
        there = counts[own] > 0
        assert found[there].tolist() == pytest.approx(wanted[own][there].tolist(), rel=1e-12)
        total += share
    assert total == whole
