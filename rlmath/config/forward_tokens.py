"""Token budget of forward-only passes (``actor.max_tokens_per_forward``)."""

from __future__ import annotations

from rlmath.config.actor import ActorConfig
from rlmath.config.schema import Device

# Multiple of the update's budget. With this one, a pass takes less memory than the update even
# where that recomputes every layer.
DEFAULT_TIMES = 2


def forward_tokens(actor: ActorConfig, device: Device) -> int | None:
    """Most tokens of a micro-batch of a forward-only pass; ``None``: as in the update.

    Larger ones save launches, which CPU ranks do not have, and leave pipeline stages fewer
    micro-batches to be busy with.
    """
    if actor.max_tokens_per_forward is not None:
        return actor.max_tokens_per_forward
    is_larger = device is Device.cuda and actor.pipeline_parallel == 1
    return DEFAULT_TIMES * actor.max_tokens_per_microbatch if is_larger else None
