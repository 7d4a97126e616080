"""Packed micro-batches under ``actor.fp8``: tokens of each tensor rank are whole blocks."""

import pytest
import torch

from rlmath.actor.packing import pack
from rlmath.device import CPU
from rlmath.model.fp8_training import Fp8Training, padded_tokens
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch, TrainingBatch

LENGTHS = torch.tensor([37, 90, 6])


def batch():
    responses = LENGTHS // 2
    per_token = torch.zeros(int(responses.sum()))
    return TrainingBatch(
        tokens=torch.arange(int(LENGTHS.sum())),
        prompt_lengths=LENGTHS - responses,
        response_lengths=responses,
        group_ids=torch.arange(3),
        weights_versions=torch.zeros(3, dtype=torch.int64),
        rewards=torch.zeros(3),
        engine_log_probs=per_token,
        loss_mask=torch.ones(len(per_token), dtype=torch.bool),
    )


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
