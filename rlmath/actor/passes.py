"""The forward passes of a rank's policy: what surrounds each of them.

A pass is its name and a list of context managers, made when the rank starts. A setting that changes
how a pass is computed is one entry of that list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlmath.actor.fp8 import without_fp8
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.quantized_cache import quantized_cache
from rlmath.actor.quantized_products import quantized_products
from rlmath.actor.rounding_noise import rounding_noise
from rlmath.batching.shards import Shard

if TYPE_CHECKING:
    from rlmath.actor.policy import MegatronActor

# A context manager around a pass, from its shard, the packed micro-batches, and a seed.
Around = Callable[[Shard, Sequence[PackedMicroBatch], int], contextlib.AbstractContextManager[Any]]


def forward_passes(actor: MegatronActor) -> Mapping[str, Sequence[Around]]:
    """What surrounds each pass.

    ``policy`` gives the log-probs of any shard, and ``old`` those of the step's before its update:
    under routing replay it records the routes. ``reference`` has the reference model's weights.
    ``noise`` is ``policy`` with every activation rounded otherwise, by the seed, and in the model's
    type although the actor trains in FP8; ``quantized_noise`` also has in FP8 what the engines
    have.
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
