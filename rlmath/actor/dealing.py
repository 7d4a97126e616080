"""Sequences on their way from the driver to the data-parallel ranks, and token values back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmath.actor.rank_calls import ActorError
from rlmath.actor.token_values import TokenValues
from rlmath.batching.held_shards import are_held, held_shards
from rlmath.batching.shards import Sequences, ShardSettings, response_rows, shards
from rlmath.utils.array_refs import ArrayRef


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


def assembled(
    shares: Sequence[TokenValues], places: Sequence[Tensor], response_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Put the data-parallel shares in the batch's order; each token has to come exactly once."""
    rows = torch.cat([response_rows(one, response_lengths) for one in places])
    total = int(response_lengths.sum())
    log_probs = _scatter(rows, torch.cat([share.log_probs for share in shares]), total)
    return log_probs, _scatter(rows, torch.cat([share.entropy for share in shares]), total)


def _scatter(rows: Tensor, values: Tensor, total: int) -> Tensor:
    once = rows.numel() == total and int(torch.bincount(rows, minlength=total).max()) == 1
    if not once or values.numel() != total:
        raise ActorError(
            f"{values.numel()} token values came back for {total} response tokens: some are "
            "missing or duplicated"
        )
    placed = torch.empty(total)
    placed[rows] = values
    return placed
