"""Meaning of ``actor.fp8`` and ``actor.fp8_recipe``."""

from __future__ import annotations

from rlmath.config.actor import ActorConfig, Fp8
from rlmath.model.fp8_training import Fp8Training


def fp8_of(actor: ActorConfig) -> Fp8Training | None:
    """How the actor computes in FP8; ``None``: it does not."""
    if actor.fp8 is Fp8.none:
        return None
    return Fp8Training(actor.fp8.value, actor.fp8_recipe.value)
