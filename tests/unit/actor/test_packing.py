import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmath.actor.context import context_classes, context_share, own_positions
from rlmath.actor.packing import pack
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.device import CPU
from rlmath.model.fp8_training import Fp8Training, padded_tokens
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch
from tests.support.batches import batch_of_lengths


def test_a_rank_has_a_piece_of_the_beginning_and_one_of_the_end():
    # 8 tokens in 4 pieces: rank 0 has the first and the last.
    assert own_positions([8], 2, 0).tolist() == [0, 1, 6, 7]
    assert own_positions([8], 2, 1).tolist() == [2, 3, 4, 5]
    # Each sequence of a row is cut alone.
    assert own_positions([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]


@pytest.mark.parametrize("contexts", [2, 3, 4])
def test_values_come_together_in_the_order_of_the_text(contexts):
    sizes = [2 * contexts * n for n in (3, 1, 5)]
    rows = torch.tensor([0, 1, 5, sizes[0] - 1, sizes[0] + 1, sum(sizes) - 2])
    rank_rows, sent, largest = [], [], 0
    for rank in range(contexts):
        share, chosen, places = context_share(sizes, contexts, rank, rows)
        own = own_positions(sizes, contexts, rank)
        # In its own row the rank finds the positions that are its share.
        assert torch.equal(own[places], rows[chosen])
        assert share.first == rank * share.largest
        largest = share.largest
        rank_rows.append(rows[chosen])
        sent.append(torch.nn.functional.pad(rows[chosen], (0, largest - len(chosen)), value=-1))
    assert torch.cat(rank_rows).sort().values.tolist() == rows.tolist()
    assert largest == max(map(len, rank_rows))
    assert torch.equal(torch.cat(sent)[share.order], rows)


@pytest.mark.parametrize("contexts", [2, 4])
def test_a_query_sees_the_tokens_before_it_and_no_others(contexts):
    sizes = [2 * contexts, 6 * contexts, 2 * contexts]
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    position = torch.cat([torch.arange(size) for size in sizes])
    everything = torch.cat([own_positions(sizes, contexts, rank) for rank in range(contexts)])
    for rank in range(contexts):
        own = own_positions(sizes, contexts, rank)
        seen = 0
        for one in context_classes(sizes, contexts, rank):
            queries, keys = own[one.queries], everything[one.keys]
            # Whole sequences in the order of the text.
            assert (position[keys] == torch.arange(keys.size(1))).all()
            assert (sequence[queries][:, :1] == sequence[keys][:, :1]).all()
            for query, mask in zip(queries.T, one.mask, strict=True):
                assert (position[query] == int(mask.sum()) - 1).all()
                assert mask[: int(mask.sum())].all()
            seen += queries.numel()
        assert seen == len(own)


LENGTHS = torch.tensor([37, 90, 6])


def batch():
    return batch_of_lengths(LENGTHS - LENGTHS // 2, LENGTHS // 2)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 1, 1, context_parallel=2)], ids=str
)
def test_rows_are_whole_blocks_and_sequences_are_as_before(recipe, layout):
    fp8 = Fp8Training("hybrid", recipe)
    everything = MicroBatch((0, 1, 2), int(LENGTHS.sum()))
    usual = pack(batch(), everything, CPU, layout)
    found = pack(batch(), everything, CPU, layout, rows_per_rank=fp8.block)
    tokens = found.tokens.size(1)
    assert tokens % (layout.tensor_parallel * fp8.block) == 0
    assert tokens - usual.tokens.size(1) < layout.tensor_parallel * fp8.block
    assert torch.equal(found.targets, usual.targets)
    assert torch.equal(found.sequence_ids, usual.sequence_ids)
    assert found.text_tokens == usual.text_tokens == int(LENGTHS.sum())
    if layout.context_parallel == 1:
        assert tokens == padded_tokens(int(LENGTHS.sum()), fp8, layout)
        assert torch.equal(found.rows, usual.rows)
        # The padding is a separate sequence, which no other sees.
        assert int(found.packed_seq_params.cu_seqlens_q[-2]) == int(LENGTHS.sum())
    empty = pack(batch(), MicroBatch((), 0), CPU, layout, rows_per_rank=fp8.block)
    assert empty.tokens.size(1) == layout.tensor_parallel * fp8.block


def batch_of(texts):
    """Prompts and responses; all of one group, which alone proves nothing."""
    batch = batch_of_sequences(texts)
    return dataclasses.replace(batch, group_ids=torch.zeros_like(batch.group_ids))


def pack_texts(texts, tensor_parallel=1, share=True):
    batch = batch_of(texts)
    everything = MicroBatch(tuple(range(len(texts))), int(batch.sequence_lengths.sum()))
    return pack(batch, everything, CPU, Layout(tensor_parallel, 1, 1), share_prompts=share)


def check(texts, found):
    """Attention gets each sequence from position 0 on; and what the loss
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
    usual = pack_texts(texts, share=False)
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
    found = pack_texts(texts)
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
def test_packing_without_shared_prompts_is_unchanged(texts):
    found, usual = pack_texts(texts), pack_texts(texts, share=False)
    assert torch.equal(found.tokens, usual.tokens)
    assert found.packed_seq_params.cu_seqlens_q.dim() == 1
    check(texts, found)


def test_prompts_that_differ_in_their_last_token_share_the_others():
    texts = [([1, 2, 3], [7, 8]), ([1, 2, 4], [9])]
    found = pack_texts(texts)
    assert found.tokens.tolist() == [[1, 2, 3, 7, 8, 4, 9]]
    check(texts, found)


def test_the_row_is_padded_for_tensor_ranks_by_one_more_sequence():
    texts = [([1, 2, 3], [7, 8]), ([1, 2, 3], [9])]
    found = pack_texts(texts, 2)
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
    found = pack_texts(texts, tensor_parallel)
    assert found.tokens.size(1) % tensor_parallel == 0
    check(texts, found)
