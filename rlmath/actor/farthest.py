"""The token of a minibatch whose probability moved most, for the warning about clamped ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.losses import LossOutput
from rlmath.algorithms.losses.base import LOG_RATIO_LIMIT
from rlmath.types import TrainingBatch


@dataclass(frozen=True)
class Farthest:
    """A response token; ``abs`` says how far it moved.

    Attributes:
        row: Among the minibatch's response tokens; a float, as it travels between ranks.
        log_ratio: Of current over old policy, in nats, before the clamp.
    """

    row: float = 0.0
    log_ratio: float = 0.0

    @classmethod
    def of(cls, output: LossOutput, rows: Tensor) -> Farthest:
        """That of a cut; ``rows`` says where its tokens are in the minibatch."""
        if output.farthest is None or not rows.numel():
            return cls()
        place, log_ratio = output.farthest.tolist()
        return cls(float(rows[int(place)]), log_ratio)

    def __abs__(self) -> float:
        return abs(self.log_ratio)


def say_clamped(metrics: Mapping[str, float], farthest: Farthest, minibatch: TrainingBatch) -> str:
    """How many tokens of a minibatch were clamped, and which one moved most."""
    row = int(farthest.row)
    ends = torch.cumsum(minibatch.response_lengths, 0)
    sequence = int((ends <= row).sum())
    token = row - int(ends[sequence] - minibatch.response_lengths[sequence])
    at = int(minibatch.sequence_lengths[:sequence].sum() + minibatch.prompt_lengths[sequence])
    return (
        f"{metrics['log_ratio_clamped_count']:.0f} of {metrics['token_count']:.0f} tokens have a "
        f"log-ratio beyond ±{LOG_RATIO_LIMIT:g} and no gradient; farthest: response token {token} "
        f"of sequence {sequence} of the minibatch (token id {int(minibatch.tokens[at + token])}), "
        f"log-ratio {farthest.log_ratio:.4g}. The policy moved that far since the old log-probs: "
        "a lower actor.optimizer.lr or fewer algorithm.minibatches_per_step keep it closer"
    )
