"""``shared_memory`` moves experts without a message: a rank writes its own and nothing else."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rlmath.weights.buckets import view_in_buffer
from rlmath.weights.pieces import expert_tensors
from tests.unit.weights.model_ranks import gatherer_of
from tests.unit.weights.shapes import QWEN3_MOE

SPEC = replace(QWEN3_MOE, vocab=64)
MESSAGES = ("broadcast", "isend", "irecv", "batch_isend_irecv", "all_reduce", "all_gather_object")


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_writes_its_own_experts_and_sends_nothing(monkeypatch, ranks):
    spec = replace(SPEC, kv_heads=ranks)
    # Buckets that are smaller than an expert's matrix.
    gatherer, _ = gatherer_of(monkeypatch, spec, ranks, 0.0005)

    def sent(*_, **__):
        raise AssertionError("a message was sent")

    for name in MESSAGES:
        monkeypatch.setattr(dist, name, sent)
    experts, written = expert_tensors(spec), set()
    for _ in range(2):
        for bucket in gatherer.buckets:
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            gatherer.write_local(bucket, buffer)
            for tensor in bucket.tensors:
                if tensor.meta.name in experts:
                    values = view_in_buffer(buffer, tensor)
                    assert values.any() == values.all(), "whole, or nothing of it"
                    written |= {tensor.meta.name} if values.any() else set()
    # The first rank has the first experts of every layer.
    own = {name for name, expert in experts.items() if expert < spec.experts // ranks}
    assert written == own and len(own) * ranks == len(experts)
