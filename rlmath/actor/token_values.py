"""Values of each response token from a pass of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.actor.rank_calls import ActorError
from rlmath.batching.shards import response_rows


@dataclass(frozen=True)
class TokenValues:
    """Values of the response tokens of a micro-batch, or of all on a rank."""

    response_rows: Tensor  # [r] int64, their indices among the R response tokens.
    log_probs: Tensor  # [r] float32.
    entropy: Tensor  # [r] float32, in nats.
    sequence_sums: Tensor | None = None  # Sums of an update's micro-batch, see sums_of_sequences.


def assemble(
    shares: Sequence[TokenValues], places: Sequence[Tensor], response_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Put data-parallel shares in the batch's order; each token must occur exactly once."""
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
