"""Bytes that a forward pass keeps for the backward pass, counted from autograd itself."""

import math

import torch

from rlmath.actor.model import ModelSettings
from tests.support.actors import build
from tests.support.batches import batch_of_lengths
from tests.support.models import VOCAB


def equal_sequences(count, prompt, response):
    """A batch whose packs are rectangles, so that attention on a CPU pads nothing."""
    return batch_of_lengths(
        [prompt] * count,
        [response] * count,
        tokens=torch.randint(0, VOCAB, (count * (prompt + response),)),
        group_ids=torch.zeros(count, dtype=torch.int64),
        engine_log_probs=torch.full((count * response,), -math.log(VOCAB)),
        advantages=torch.ones(count * response),
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
