"""The weight sync, which gives the engines the actor's weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlmath.device.residue import Residue
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.wake_room import WakeRoom
from rlmath.weights.fingerprint import compare_fingerprints
from rlmath.weights.slices import Rotation, WeightSlice

# An engine that takes its first weights may still ignore the second.
FIRST_SYNCS = 3
MAX_SHARE_OF_TIME = 0.005
# Comparisons may exceed their share of time by that of this many syncs; then syncs without a
# comparison follow.
MAX_DEBT_SYNCS = 4


class WeightSender(Protocol):
    """The part of the actor's interface that a weight sync uses."""

    def begin_room(self) -> Sequence[Residue]:
        """Begin to give up memory; the memory left until ``make_room``."""
        ...

    def make_room(
        self, part: str, meanwhile: Callable[[], None] | None = None
    ) -> Sequence[Residue]:
        """Give up memory before engines take it for ``weights`` or ``kv_cache``, calling
        ``meanwhile`` in the meantime; the memory left."""
        ...

    def send_weights(self, version: int) -> None:
        """Make every rank call ``TrainerConnection.send_weights``, and wait for all."""
        ...

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        """Fingerprints of the engines' expected tensors; see ``BucketGatherer.fingerprints``."""
        ...


@dataclass(frozen=True)
class Comparison:
    """The extent of a comparison after a sync."""

    part: WeightSlice | None = None  # Slice of the weights; None: all of them.
    work: float = 0.0  # Work of the slice, as counted by Rotation.
    covers_all: bool = True  # Whether every tensor has been compared when this is done.


class Verification:
    """The schedule of comparisons between fingerprints of actor and engines after weight syncs.

    If comparing all weights at every sync would take too long, each sync compares a slice that
    fits: an engine that did not take the sync at all differs in any slice, and a single wrong
    tensor is found within the round.

    Args:
        every: Syncs from one comparison of all weights to the next; ``None``: comparisons at every
            sync that together take at most 0.5 % of the time; 0: never. Unless it is 0, all weights
            are also compared in the first three syncs of started or restarted engines.
        rotation: The slices; ``None``: all weights are compared each time, and with ``every`` of
            ``None`` as often as that takes 0.5 %.
    """

    def __init__(self, every: int | None = None, rotation: Rotation | None = None) -> None:
        self._every, self._rotation = every, rotation
        self._syncs_since = 0
        self._last_sync_s: float | None = None
        self._spent_s = 0.0
        # Times of a comparison of all weights, and of an empty one.
        self._full_s, self._overhead_s = 0.0, 0.0
        # Time that comparisons may still take.
        self._balance_s = 0.0
        self.compared_share = 0.0  # Share of the weights, by work, compared after the last sync.

    def due(self, pool: RolloutPool, now_s: float) -> Comparison | None:
        """The comparison after the sync that begins at ``now_s``, if any."""
        step_s = 0.0
        if self._last_sync_s is not None:
            step_s = now_s - self._last_sync_s - self._spent_s
        self._last_sync_s, self._spent_s = now_s, 0.0
        self.compared_share = 0.0
        self._syncs_since += 1
        if self._every == 0:
            return None
        if pool.verified_syncs < FIRST_SYNCS:
            return self._all()
        if self._every is not None:
            return self._all() if self._syncs_since >= self._every else None
        share_s = MAX_SHARE_OF_TIME * step_s
        self._balance_s = min(self._balance_s + share_s, self._full_s)
        if self._balance_s >= self._full_s:
            return self._all()
        if self._rotation is None or self._balance_s < -MAX_DEBT_SYNCS * share_s:
            return None
        # At least half of a comparison is work, or a round would take too many.
        wanted_s = max(self._balance_s, share_s / 2, 2 * self._overhead_s)
        if wanted_s >= self._full_s:
            return None
        work = (wanted_s - self._overhead_s) / self._full_s * self._rotation.work
        part, taken = self._rotation.pop(work)
        return Comparison(part, taken, self._rotation.is_at_start)

    def _all(self) -> Comparison:
        if self._rotation is not None and not self._rotation.is_at_start:
            self._rotation.restart()
        return Comparison()

    def record(self, pool: RolloutPool, comparison: Comparison, seconds: float) -> None:
        """Record a comparison that found no difference and took ``seconds``."""
        if comparison.part is None:
            # The comparisons after a start of engines do not count.
            if pool.verified_syncs < FIRST_SYNCS:
                self._spent_s = seconds
            else:
                self._balance_s -= seconds
            self._full_s = seconds
            self.compared_share = 1.0
        else:
            assert self._rotation is not None
            self._balance_s -= seconds
            self.compared_share = comparison.work / self._rotation.work
            expected_s = self.compared_share * self._full_s
            self._overhead_s += (max(seconds - expected_s, 0.0) - self._overhead_s) / 4
        if comparison.covers_all:
            pool.verified_syncs += 1
            self._syncs_since = 0


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

    Engines that share the actor's GPUs first take memory for weights and, after the weights have
    arrived, for the KV cache. Before each, the actor offloads: first the optimizer state, then the
    weights, once they are sent, so that the two sides never hold everything at once. The copies to
    the host begin at the end of the update, and engines need not wait for the optimizer's copy if
    ``wake_room`` finds memory for their weights beside it.
    Each engine resets its prefix cache before it reports the version.

    Args:
        pool: Its engines, without unfinished requests.
        version: Larger than the pool's, or the pool's with ``again``.
        verification: Schedule of comparisons of the engines' weights with the actor's; ``None``:
            no comparison this time.
        again: Whether the engines have read other weights for this version than the actor's.
        wake_room: Decides whether engines wake while ranks copy; ``None``: they wait.

    Returns:
        Memory of the ranks while all engines slept, and just before engines allocated KV caches.

    Raises:
        WeightsError: An engine holds other weights; the tensors are named.
        ValueError: The version is not new.
        EngineError: An engine did not take the weights.
    """
    if version < pool.weights_version + (not again):
        raise ValueError(f"weights version {version} is not after {pool.weights_version}")
    due = None if verification is None else verification.due(pool, time.monotonic())
    pool.settle()
    asleep = _wake_for_weights(sender, pool, wake_room)
    sender.send_weights(version)
    began_s = time.monotonic()
    # While the weights are still on the device.
    sent = None if due is None else sender.weights_fingerprints(due.part)
    cost_s = time.monotonic() - began_s
    offloaded = sender.make_room("kv_cache")
    if wake_room is not None:
        wake_room.update(asleep, offloaded)
    pool.wake("kv_cache")
    pool.set_version(version)
    if verification is not None and due is not None:
        began_s = time.monotonic()
        compare_weights(sender, pool, sent, due.part)
        verification.record(pool, due, cost_s + time.monotonic() - began_s)
    return asleep, offloaded


def _wake_for_weights(
    sender: WeightSender, pool: RolloutPool, wake_room: WakeRoom | None
) -> Sequence[Residue]:
    asleep = sender.begin_room()
    wake = functools.partial(pool.wake, "weights")
    if wake_room is not None and wake_room.decide(asleep):
        sender.make_room("weights", meanwhile=wake)
    else:
        sender.make_room("weights")
        wake()
    return asleep


def compare_weights(
    sender: WeightSender,
    pool: RolloutPool,
    sent: Mapping[str, int] | None = None,
    part: WeightSlice | None = None,
) -> int:
    """Compare every engine's weights with the actor's. Returns the number of tensors that were
    compared. Raises WeightsError: an engine holds other weights; the tensors are named.

    Args:
        sent: Fingerprints of the actor's weights; ``None``: they are taken now.
        part: Only this slice; ``None``: everything.
    """
    sent = sender.weights_fingerprints(part) if sent is None else sent
    compared = 0
    for index, held in enumerate(pool.weights_fingerprints(part)):
        where = f"engine {index}, at weights version {pool.weights_version},"
        if part is not None:
            where += " in the slice that was compared"
        compare_fingerprints(sent, held, where)
        compared = sum(value is not None for value in held.values())
    return compared
