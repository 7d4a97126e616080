"""The forward passes of a rank's policy, and the context managers around each.

A pass is a name and a list of context managers, made when the rank starts. A setting that changes
the computation of a pass is one entry of that list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlmath.actor.fp8 import without_fp8
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.quantized_products import quantized_cache, quantized_products
from rlmath.actor.rounding_noise import rounding_noise
from rlmath.batching.shards import Shard

if TYPE_CHECKING:
    from rlmath.actor.policy import MegatronActor

# A context manager around a pass, given its shard, the packed micro-batches, and a seed.
Around = Callable[[Shard, Sequence[PackedMicroBatch], int], contextlib.AbstractContextManager[Any]]


def forward_passes(actor: MegatronActor) -> Mapping[str, Sequence[Around]]:
    """The context managers of each pass.

    ``policy`` computes the log-probs of any shard, and ``old`` those of the step's shard before its
    update: with routing replay it records the routes. ``reference`` uses the reference model's
    weights. ``noise`` is ``policy`` with every activation rounded differently, depending on the
    seed, and in the model's type even if the actor trains in FP8; ``quantized_noise`` also uses FP8
    where the engines do.
    """
    module, settings, routing = actor.module, actor.settings, actor.routing
    recorded: list[Around] = []
    followed: list[Around] = []
    if routing is not None:
        recorded = [lambda shard, packed, seed: routing.recording(shard, packed)]
        followed = [lambda shard, packed, seed: routing.following(shard, packed)]
    noise: list[Around] = [lambda shard, packed, seed: rounding_noise(module, seed)]
    if settings.model.fp8 is not None:
        noise.append(lambda shard, packed, seed: without_fp8(module))
    quantized: list[Around] = []
    if settings.engines_in_fp8.matrices:
        quantized.append(lambda shard, packed, seed: quantized_products(module))
    if settings.engines_in_fp8.kv_cache:
        quantized.append(lambda shard, packed, seed: quantized_cache(module))
    return {
        "policy": followed,
        "old": recorded,
        "reference": [lambda shard, packed, seed: actor.reference_weights()],
        "noise": [*noise, *followed],
        "quantized_noise": [*noise, *quantized, *followed],
    }
