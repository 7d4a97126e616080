"""The weight sync: brings the engines to the actor's weights."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rlmath.device.residue import Residue
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.wake_room import WakeRoom
from rlmath.weights.fingerprint import compare_fingerprints

# An engine that takes its first weights may still ignore the second.
FIRST_SYNCS = 3
MAX_SHARE_OF_TIME = 0.005
MAX_INTERVAL_SYNCS = 50


class WeightSender(Protocol):
    """What a weight sync needs of the actor."""

    def begin_room(self) -> Sequence[Residue]:
        """Begin to give up memory; what is there until ``make_room``."""
        ...

    def make_room(
        self, part: str, meanwhile: Callable[[], None] | None = None
    ) -> Sequence[Residue]:
        """Give up memory before engines take it for ``weights`` or ``kv_cache``, and call
        ``meanwhile`` during that; what is left."""
        ...

    def send_weights(self, version: int) -> None:
        """Let every rank call ``TrainerConnection.send_weights``; returns when all have."""
        ...

    def weights_fingerprints(self) -> dict[str, int]:
        """Of each tensor that the engines should hold; see ``BucketGatherer.fingerprints``."""
        ...


class Verification:
    """After which weight syncs the fingerprints of actor and engines are compared.

    Args:
        every: Syncs from one comparison to the next; ``None``: as often as takes at most 0.5 % of
            the time between syncs, and at least every 50; 0: never. Unless it is 0, also after the
            first three syncs of engines that were started or started again.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._syncs_since = 0
        self._last_sync_s: float | None = None
        self._step_s = 0.0
        self._cost_s = 0.0

    def due(self, pool: RolloutPool, now_s: float) -> bool:
        """Whether to compare after the sync that begins at ``now_s``."""
        if self._last_sync_s is not None:
            self._step_s = now_s - self._last_sync_s
        self._last_sync_s = now_s
        self._syncs_since += 1
        if self._every == 0:
            return False
        return pool.verified_syncs < FIRST_SYNCS or self._syncs_since >= self.interval_syncs

    @property
    def interval_syncs(self) -> int:
        """Syncs from one comparison to the next."""
        if self._every is not None:
            return self._every
        if not self._step_s:
            return 1
        wanted = math.ceil(self._cost_s / (MAX_SHARE_OF_TIME * self._step_s))
        return min(max(1, wanted), MAX_INTERVAL_SYNCS)

    def done(self, pool: RolloutPool, seconds: float) -> None:
        """A comparison found nothing, and took ``seconds``."""
        pool.verified_syncs += 1
        self._syncs_since = 0
        self._cost_s = seconds


def sync_weights(
    sender: WeightSender,
    pool: RolloutPool,
    version: int,
    verification: Verification | None = None,
    *,
    again: bool = False,
    wake_room: WakeRoom | None = None,
) -> tuple[Sequence[Residue], Sequence[Residue]]:
    """Send the actor's present weights to all engines.

    Engines that share the actor's GPUs first take memory for weights and, when these have
    arrived, for the KV cache. Before each, the actor gives up what it offloads: optimizer state
    first, and weights once they are sent, so that neither side holds everything beside the other.
    Both are copied to the host from the update's end on, and engines need not wait for the
    optimizer's copy where ``wake_room`` finds memory for their weights beside it.
    Each engine resets its prefix cache before it reports the version.

    Args:
        sender: The actor.
        pool: Its engines, without unfinished requests.
        version: Larger than the pool's, or the pool's with ``again``.
        verification: When to compare what the engines then hold with the actor's weights.
            ``None``: not this time.
        again: The engines read other weights for this version than the actor has.
        wake_room: Decides whether engines wake while ranks copy; ``None``: they wait.

    Returns:
        What the ranks had while all engines slept, and before these took memory for the KV cache.

    Raises:
        WeightsError: An engine holds other weights; the tensors are named.
        ValueError: The version is not new.
        EngineError: An engine did not take the weights.
    """
    if version < pool.weights_version + (not again):
        raise ValueError(f"weights version {version} is not after {pool.weights_version}")
    due = verification is not None and verification.due(pool, time.monotonic())
    pool.settle()
    asleep = sender.begin_room()
    wake = functools.partial(pool.wake, "weights")
    if wake_room is not None and wake_room.decide(asleep):
        sender.make_room("weights", meanwhile=wake)
    else:
        sender.make_room("weights")
        wake()
    sender.send_weights(version)
    began_s = time.monotonic()
    # While the weights are still on the device.
    sent = sender.weights_fingerprints() if due else None
    cost_s = time.monotonic() - began_s
    offloaded = sender.make_room("kv_cache")
    if wake_room is not None:
        wake_room.see(asleep, offloaded)
    pool.wake("kv_cache")
    pool.set_version(version)
    if verification is not None and due:
        began_s = time.monotonic()
        compare_weights(sender, pool, sent)
        verification.done(pool, cost_s + time.monotonic() - began_s)
    return asleep, offloaded


def compare_weights(
    sender: WeightSender, pool: RolloutPool, sent: Mapping[str, int] | None = None
) -> int:
    """Compare what every engine holds with the actor's present weights.

    Args:
        sender: The actor.
        pool: Its engines.
        sent: Fingerprints of the actor's weights; ``None``: they are taken now.

    Returns:
        The number of tensors that were compared.

    Raises:
        WeightsError: An engine holds other weights; the tensors are named.
    """
    sent = sender.weights_fingerprints() if sent is None else sent
    compared = 0
    for index, held in enumerate(pool.weights_fingerprints()):
        where = f"engine {index}, at weights version {pool.weights_version},"
        compare_fingerprints(sent, held, where)
        compared = sum(value is not None for value in held.values())
    return compared
