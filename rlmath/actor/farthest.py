"""The token of a minibatch whose probability changed most, for the warning on clamped ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.losses import LossOutput
from rlmath.algorithms.losses.base import LOG_RATIO_LIMIT
from rlmath.batching.shards import Share


@dataclass(frozen=True)
class Farthest:
    """A response token; ``abs`` is the size of its change. All floats, as exchanged by ranks."""

    sequence: float = 0.0  # Index of its sequence in the step.
    token: float = 0.0  # Index in the response.
    token_id: float = 0.0  # Id in the vocabulary.
    log_ratio: float = 0.0  # Log-ratio of the current to the old policy, in nats, before the clamp.

    @classmethod
    def of(cls, output: LossOutput, rows: Tensor, share: Share) -> Farthest:
        """The farthest token of a micro-batch; ``rows`` are its tokens' indices in the share."""
        if output.farthest is None or not rows.numel():
            return cls()
        place, log_ratio = output.farthest.tolist()
        row, batch = int(rows[int(place)]), share.batch
        ends = torch.cumsum(batch.response_lengths, 0)
        sequence = int((ends <= row).sum())
        token = row - int(ends[sequence] - batch.response_lengths[sequence])
        first = int(batch.sequence_lengths[:sequence].sum() + batch.prompt_lengths[sequence])
        token_id = float(batch.tokens[first + token])
        return cls(float(share.places[sequence]), float(token), token_id, log_ratio)

    def __abs__(self) -> float:
        return abs(self.log_ratio)


def say_clamped(metrics: Mapping[str, float], farthest: Farthest) -> str:
    """The number of a minibatch's clamped tokens, and the one that changed most."""
    return (
        f"{metrics['log_ratio_clamped_count']:.0f} of {metrics['token_count']:.0f} tokens have a "
        f"log-ratio beyond ±{LOG_RATIO_LIMIT:g}, which was clamped; farthest: response token "
        f"{farthest.token:.0f} of sequence {farthest.sequence:.0f} of the batch (token id "
        f"{farthest.token_id:.0f}), "
        f"log-ratio {farthest.log_ratio:.4g}. The policy moved that far since the old log-probs: "
        "a lower actor.optimizer.lr or fewer algorithm.minibatches_per_step keep it closer"
    )
