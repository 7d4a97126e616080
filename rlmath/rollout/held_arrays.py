"""Samples whose arrays stay in the object store of the engine's node (``rollout.arrays=engines``).

An engine's answer has two parts, which Ray returns together or not at all: samples without their
arrays, and the block of these. The driver owns both, so that a block outlives the engine's process.
What Ray would put into its answer for being small is left where it was made all the same
(:mod:`rlmath.utils.ray_returns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmath.types import Group, Sample
from rlmath.utils.array_refs import ArrayRef, lost_arrays, origins_of

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
    samples = fetched_samples([one.sample for one in group.samples])
    return replace(
        group,
        samples=tuple(
            replace(one, sample=sample) for one, sample in zip(group.samples, samples, strict=True)
        ),
    )


def fetched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that have their arrays here; all blocks are brought at once.

    Raises:
        LostArrays: Some are gone.
    """
    import ray
    from ray.exceptions import ObjectLostError

    tokens = [one.token_ids for one in samples]
    refs = list(dict.fromkeys(one.block for one in tokens if isinstance(one, ArrayRef)))
    try:
        blocks = dict(zip(refs, ray.get(refs), strict=True)) if refs else {}
    except ObjectLostError as error:
        raise lost_arrays(origins_of(tokens, error), error) from error
    return [_fetched(one, blocks) for one in samples]


def _fetched(sample: Sample, blocks: Mapping[Any, NDArray[np.int32]]) -> Sample:
    tokens, log_probs = sample.token_ids, sample.log_probs
    if not isinstance(tokens, ArrayRef) or not isinstance(log_probs, ArrayRef):
        return sample
    # Their own memory: a view would keep the block in the driver's store.
    block = blocks[tokens.block]
    return replace(sample, token_ids=tokens.of(block).copy(), log_probs=log_probs.of(block).copy())
