"""Samples whose arrays stay in the object store of the engine's node (``rollout.arrays=engines``).

An engine's answer has two parts, which Ray returns together or not at all: samples without their
arrays, and the block of these. The driver owns both, so that a block outlives the engine's process.
What Ray would put into its answer for being small is left where it was made all the same
(:mod:`rlmath.utils.ray_returns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmath.types import Group, Sample
from rlmath.utils.array_refs import ArrayRef

if TYPE_CHECKING:
    from numpy.typing import NDArray


def hold(samples: Sequence[Sample]) -> tuple[tuple[Sample, ...], NDArray[np.int32] | None]:
    """Take the arrays of samples that have figures of them.

    Returns:
        All samples, and the block; ``None``: no sample has figures.
    """
    held, pieces, start = [], [], 0
    for sample in samples:
        if sample.figures is not None:
            count = len(sample.token_ids)
            pieces += [
                np.asarray(sample.token_ids, np.int32),
                np.asarray(sample.log_probs, np.float32).view(np.int32),
            ]
            sample = replace(
                sample,
                token_ids=ArrayRef(None, start, count, "int32"),
                log_probs=ArrayRef(None, start + count, count, "float32"),
            )
            start += 2 * count
        held.append(sample)
    if not pieces:
        return tuple(held), None
    return tuple(held), np.concatenate(pieces)


def bound(samples: Sequence[Sample], block: Any) -> tuple[Sample, ...]:
    """Samples of :func:`hold` that know where their block is.

    Args:
        samples: As they came.
        block: Ray's reference to it.
    """
    return tuple(_bound(sample, block) for sample in samples)


def _bound(sample: Sample, block: Any) -> Sample:
    tokens, log_probs = sample.token_ids, sample.log_probs
    if not isinstance(tokens, ArrayRef) or not isinstance(log_probs, ArrayRef):
        return sample
    origin = f"sample {sample.index} of problem {sample.problem_id} (engine {sample.engine})"
    return replace(
        sample,
        token_ids=replace(tokens, block=block, origin=origin),
        log_probs=replace(log_probs, block=block, origin=origin),
    )


def fetched(group: Group) -> Group:
    """A group whose samples have their arrays here, and need no engine's node any more.

    Raises:
        LostArrays: They are gone.
    """
    if not any(isinstance(one.sample.token_ids, ArrayRef) for one in group.samples):
        return group
    return replace(
        group,
        samples=tuple(replace(one, sample=fetched_sample(one.sample)) for one in group.samples),
    )


def fetched_sample(sample: Sample) -> Sample:
    """A sample that has its arrays here.

    Raises:
        LostArrays: They are gone.
    """
    if not isinstance(sample.token_ids, ArrayRef):
        return sample
    return replace(
        sample, token_ids=np.asarray(sample.token_ids), log_probs=np.asarray(sample.log_probs)
    )
