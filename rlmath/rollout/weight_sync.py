"""The weight sync: brings the engines to the actor's weights."""

from __future__ import annotations

from typing import Protocol

from rlmath.rollout.pool import RolloutPool
from rlmath.weights.fingerprint import compare_fingerprints


class WeightSender(Protocol):
    """What a weight sync needs of the actor."""

    def send_weights(self, version: int, verify: bool) -> None:
        """Let every rank call ``TrainerConnection.send_weights``; returns when all have."""
        ...

    def weights_fingerprints(self) -> dict[str, int]:
        """Of each tensor that the engines should hold; see ``BucketGatherer.fingerprints``."""
        ...


def sync_weights(
    sender: WeightSender, pool: RolloutPool, version: int, *, verify_every: int = 0
) -> None:
    """Send the actor's present weights to all engines.

    Engines that share the actor's GPUs first take memory for weights and, when these have
    arrived, for the KV cache. Each engine resets its prefix cache before it reports the version.

    Args:
        sender: The actor.
        pool: Its engines, without unfinished requests.
        version: Larger than the pool's.
        verify_every: Compare the fingerprints of what the engines then hold with the actor's at
            the first update (of a run, or after an engine was started again) and at every version
            that this divides; 0: never.

    Raises:
        WeightsError: An engine holds other weights; the tensors are named.
        ValueError: The version is not new.
        EngineError: An engine did not take the weights.
    """
    if version <= pool.weights_version:
        raise ValueError(f"weights version {version} is not after {pool.weights_version}")
    pool.settle()
    pool.wake("weights")
    verify = verify_every > 0 and (not pool.weights_verified or version % verify_every == 0)
    sender.send_weights(version, verify)
    pool.wake("kv_cache")
    pool.set_version(version)
    if verify:
        sent = sender.weights_fingerprints()
        for index, held in enumerate(pool.weights_fingerprints()):
            compare_fingerprints(sent, held, f"engine {index}, at weights version {version},")
        pool.weights_verified = True
