"""Packs in which sequences share the rows of their prompt."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.actor.packing import pack
from rlmath.device import CPU
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch, TrainingBatch

Texts = list[tuple[list[int], list[int]]]


def batch_of(texts):
    """Prompts and responses; all of one group, which alone proves nothing."""
    count, total = len(texts), sum(len(response) for _, response in texts)
    return TrainingBatch(
        tokens=torch.tensor([t for text in texts for part in text for t in part]),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in texts]),
        response_lengths=torch.tensor([len(response) for _, response in texts]),
        group_ids=torch.zeros(count, dtype=torch.int64),
        weights_versions=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
        engine_log_probs=torch.zeros(total),
        loss_mask=torch.ones(total, dtype=torch.bool),
    )


def packed(texts, tensor_parallel=1, share=True):
    batch = batch_of(texts)
    everything = MicroBatch(tuple(range(len(texts))), int(batch.sequence_lengths.sum()))
    return pack(batch, everything, CPU, Layout(tensor_parallel, 1, 1), share_prompts=share)


def check(texts, found):
    """What attention takes of each sequence is the sequence, from position 0 on; and what the loss
    reads is as without sharing."""
    tokens, positions = found.tokens[0].tolist(), found.position_ids[0].tolist()
    rectangles = found.packed_seq_params.rectangles
    rows = [row for one in rectangles.classes for row in one.rows.tolist()]
    for place, (prompt, response) in enumerate(texts):
        whole = [*prompt, *response]
        last = int(found.rows[found.sequence_ids == place][-1]) + 1
        (own,) = [row[: len(whole)] for row in rows if last in row]
        assert [tokens[i] for i in own] == whole
        assert [positions[i] for i in own] == list(range(len(whole)))
    usual = packed(texts, share=False)
    assert torch.equal(found.targets, usual.targets)
    assert torch.equal(found.sequence_ids, usual.sequence_ids)
    assert torch.equal(found.response_rows, usual.response_rows)
    assert len(found.rows.unique()) == len(found.rows)
    assert torch.equal(found.tokens[0][found.rows], usual.tokens[0][usual.rows])
    assert torch.equal(found.position_ids[0][found.rows], usual.position_ids[0][usual.rows])
    longest = max(len(prompt) + len(response) for prompt, response in texts)
    assert found.packed_seq_params.max_seqlen_q >= longest


def test_a_prompt_is_in_the_row_once_but_for_its_last_token():
    texts = [([1, 2, 3], [7, 8]), ([1, 2, 3], [9]), ([1, 2, 3], [5, 6, 4])]
    found = packed(texts)
    assert found.tokens.tolist() == [[1, 2, 3, 7, 8, 3, 9, 3, 5, 6, 4]]
    assert found.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 3, 4, 5]]
    assert found.rows.tolist() == [2, 3, 5, 7, 8, 9]
    assert found.text_tokens == 11 and found.packed_seq_params.max_seqlen_q == 6
    assert found.packed_seq_params.cu_seqlens_q.tolist() == [[0, 5, 7, 11], [0, 2, 2, 0]]
    check(texts, found)


@pytest.mark.parametrize(
    "texts",
    [
        [([1, 2, 3], [7, 8]), ([1, 4, 3], [9])],
        [([1], [7, 8]), ([1], [9])],
        [([1, 2], [7]), ([1, 2, 3], [8])],
        [([1, 2, 3], [7]), ([4], [8]), ([1, 2, 3], [9])],
    ],
    ids=["other tokens", "one token", "other lengths", "not next to each other"],
)
def test_nothing_is_shared(texts):
    found, usual = packed(texts), packed(texts, share=False)
    assert torch.equal(found.tokens, usual.tokens)
    assert found.packed_seq_params.cu_seqlens_q.dim() == 1
    check(texts, found)


def test_prompts_that_differ_in_their_last_token_share_the_others():
    texts = [([1, 2, 3], [7, 8]), ([1, 2, 4], [9])]
    found = packed(texts)
    assert found.tokens.tolist() == [[1, 2, 3, 7, 8, 4, 9]]
    check(texts, found)


def test_the_row_is_padded_for_tensor_ranks_by_one_more_sequence():
    texts = [([1, 2, 3], [7, 8]), ([1, 2, 3], [9])]
    found = packed(texts, 2)
    assert found.tokens.tolist() == [[1, 2, 3, 7, 8, 3, 9, 0]]
    assert found.position_ids[0, -1] == 0
    check(texts, found)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([[1], [1, 2], [1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3, 4, 5, 6, 7]]),
            st.lists(st.integers(0, 9), min_size=1, max_size=9),
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1, 2, 4]),
)
def test_each_sequence_is_read_as_it_is(texts, tensor_parallel):
    found = packed(texts, tensor_parallel)
    assert found.tokens.size(1) % tensor_parallel == 0
    check(texts, found)
