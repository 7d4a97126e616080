"""Token values from the data-parallel ranks, combined on the driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlmath.actor.rank_calls import ActorError
from rlmath.actor.token_values import TokenValues
from rlmath.batching.shards import response_rows


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
