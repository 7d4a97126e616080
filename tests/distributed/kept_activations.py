"""Bytes that a forward pass keeps for the backward pass, counted from autograd itself."""

import math

import torch

from rlmath.actor.model import ModelSettings
from rlmath.types import TrainingBatch
from tests.support.actors import build
from tests.support.models import VOCAB


def equal_sequences(count, prompt, response):
    """A batch whose packs are rectangles, so that attention on a CPU pads nothing."""
    tokens = count * response
    return TrainingBatch(
        tokens=torch.randint(0, VOCAB, (count * (prompt + response),)),
        prompt_lengths=torch.full((count,), prompt),
        response_lengths=torch.full((count,), response),
        group_ids=torch.zeros(count, dtype=torch.int64),
        weights_versions=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
        engine_log_probs=torch.full((tokens,), -math.log(VOCAB)),
        advantages=torch.ones(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
    )


def kept_bytes(layout, platform, model, batch, recomputed, modules=()):
    """Storages that autograd holds after a forward pass of one micro-batch; parameters left out."""
    settings = ModelSettings(
        torch.float32,
        sequence_parallel=layout.tensor_parallel > 1,
        recompute="selective" if modules else "full" if recomputed else "none",
        recompute_num_layers=recomputed or None,
        recompute_modules=modules,
    )
    actor = build(layout, platform, model, model=settings, max_tokens_per_microbatch=10**6)
    (packed,) = actor.micro_batches(actor.shard_of(batch).whole())
    parameters = {p.untyped_storage().data_ptr() for p in actor.module.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = actor.module(
            packed.tokens, packed.position_ids, None, packed_seq_params=packed.packed_seq_params
        )
    del output
    return sum(held.values())
