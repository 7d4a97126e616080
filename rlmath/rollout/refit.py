"""Brings the engines to the actor's weights."""

from __future__ import annotations

from typing import Protocol

from rlmath.rollout.pool import RolloutPool


class WeightSender(Protocol):
    """The actor, as refit sees it."""

    def send_weights(self, version: int) -> None:
        """Let every rank call ``TrainerConnection.send_weights``; returns when all have."""
        ...


def refit(sender: WeightSender, pool: RolloutPool, version: int) -> None:
    """Send the actor's present weights to all engines.

    Engines that share the actor's GPUs first take memory for weights and, when these have
    arrived, for the KV cache. Each engine resets its prefix cache before it reports the version.

    Args:
        sender: The actor.
        pool: Its engines, without unfinished requests.
        version: Larger than the pool's.

    Raises:
        ValueError: The version is not new.
        EngineError: An engine did not take the weights.
    """
    if version <= pool.weights_version:
        raise ValueError(f"weights version {version} is not after {pool.weights_version}")
    pool.settle()
    pool.wake("weights")
    sender.send_weights(version)
    pool.wake("kv_cache")
    pool.set_version(version)
