"""Digests of a step's batch, update and weights, for ``rlmath bisect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmath.actor.group import ActorGroup
from rlmath.monitor import Monitor
from rlmath.monitor.digests import StepDigests, digest, of_number
from rlmath.training.step_batch import StepBatch
from rlmath.weights.gather import WeightChanges
from rlmath.weights.sequence_fingerprints import SequenceFingerprints


def digest_sequences(digests: StepDigests, batch: StepBatch, found: SequenceFingerprints) -> None:
    """Add which samples are trained on, and the update's inputs of each."""
    keys = batch.keys
    versions = batch.sequences.weights_versions.tolist()
    takes_part = batch.takes_part.tolist()
    groups = [
        digest(f"{key}/{version}/{part}")
        for key, version, part in zip(keys, versions, takes_part, strict=True)
    ]
    digests.add("groups", "sequences", keys, groups)
    add_fingerprints(digests, keys, found)


def add_fingerprints(
    digests: StepDigests, keys: Sequence[str], found: SequenceFingerprints
) -> None:
    """Add what ranks computed of a step's sequences. ``keys``: keys of all sequences of the
    step."""
    own = [keys[place] for place in found.places.tolist()]
    for name, bits in found.bits.items():
        sums = [round(one, 9) for one in found.sums[name].tolist()]
        digests.add(name, "sequences", own, list(map(of_number, bits.tolist())), sums)


def digest_gradient(
    digests: StepDigests, minibatches: Sequence[Mapping[str, float]], gradients: Mapping[str, int]
) -> None:
    """Loss, gradient norm and all else that is known of each minibatch, to the last bit; and the
    gradient by tensor. ``gradients``: fingerprints."""
    _digest_minibatches(digests, "gradient", "minibatches", minibatches)
    _digest_tensors(digests, "gradient_tensors", "gradients", gradients)


def digest_values(
    digests: StepDigests, minibatches: Sequence[Mapping[str, float]], weights: Mapping[str, int]
) -> None:
    """The value model's update, and its weights after it. ``weights``: fingerprints."""
    _digest_minibatches(digests, "value_gradient", "value_minibatches", minibatches)
    _digest_tensors(digests, "value_weights", "value_tensors", weights)


def _digest_minibatches(
    digests: StepDigests, phase: str, of: str, minibatches: Sequence[Mapping[str, float]]
) -> None:
    keys = [f"minibatch {number}" for number in range(1, len(minibatches) + 1)]
    found = [digest(*(f"{k}={one[k]!r}" for k in sorted(one))) for one in minibatches]
    digests.add(phase, of, keys, found, [dict(one) for one in minibatches])


def _digest_tensors(digests: StepDigests, phase: str, of: str, prints: Mapping[str, int]) -> None:
    digests.add(phase, of, list(prints), list(map(of_number, prints.values())))


def digest_start(monitor: Monitor, actor: ActorGroup) -> None:
    """The weights by tensor before the first update. The engines sleep, if they share the GPUs, and
    the ranks have their weights where they compute."""
    if monitor.digest_log.wants_start:
        with monitor.phase("digests"):
            monitor.digest_log.start(actor.weights_changes()[0].fingerprints)


def digest_weights(monitor: Monitor, actor: ActorGroup) -> list[WeightChanges]:
    """The weights by tensor after an update; and which copies have others than rank 0's, by their
    first rank. Returns changes of each rank, with the parts that did not change."""
    with monitor.phase("digests"):
        changes = actor.weights_changes()
    first, *others = (one.fingerprints for one in changes)
    odd = [rank for rank, one in enumerate(others, 1) if one and one != first]
    digests = monitor.digests
    digests.add("weights", "tensors", list(first), list(map(of_number, first.values())))
    digests.odd_ranks = odd
    return changes
