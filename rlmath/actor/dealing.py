"""Sequences on their way from the driver to the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ObjectLostError, RayTaskError
from torch import Tensor

from rlmath.batching.held_shards import are_held, held_shards
from rlmath.batching.shards import Sequences, ShardSettings, shards
from rlmath.errors import LostArrays
from rlmath.utils.array_refs import ArrayRef, lost_arrays, origins_of


@dataclass(frozen=True)
class Dealt:
    """What one rank gets.

    Attributes:
        shard: Ray's reference to it.
        blocks: References to the blocks that it is filled from, if responses stayed with the
            engines.
        places: ``[n]`` int64, of its sequences among all.
    """

    shard: Any
    blocks: tuple[Any, ...]
    places: Tensor


def deal(sequences: Sequences, settings: ShardSettings, put: Callable[[Any], Any]) -> list[Dealt]:
    """The shard of each data-parallel rank.

    Args:
        sequences: To deal.
        settings: What the split depends on.
        put: Puts one into the object store.
    """
    if are_held(sequences):
        return [
            Dealt(put(held), tuple(blocks), held.shard.places)
            for held, blocks in held_shards(sequences, settings)
        ]
    return [Dealt(put(one), (), one.places) for one in shards(sequences, settings)]


def arrays_of(sequences: Sequences) -> tuple[ArrayRef, ...]:
    """Where the responses are that stayed with the engines."""
    if not are_held(sequences):
        return ()
    tokens = [one.sample.token_ids for one in sequences.samples]
    return tuple(one for one in tokens if isinstance(one, ArrayRef))


def lost_among(arrays: Sequence[ArrayRef], error: BaseException | None) -> LostArrays | None:
    """The error that names the samples whose block Ray could not bring to a rank; ``None``: the
    call failed for another reason.

    Args:
        arrays: Those that the call's blocks have.
        error: Of the call.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if not arrays or not isinstance(cause, ObjectLostError):
        return None
    return lost_arrays(origins_of(arrays, cause), cause)
