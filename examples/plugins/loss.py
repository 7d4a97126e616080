"""A policy loss: the importance ratio is bounded smoothly, so that no token loses its gradient.

rlmath train experiment=quickstart algorithm.loss=examples/plugins/loss.py:soft_clip
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmath.algorithms.losses import LossInputs, LossTraits, policy_loss
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class SoftClipOptions(Options):
    limit: float = setting(0.3, "Bound of the log-ratio, in nats.", above=0)


@policy_loss("soft_clip", SoftClipOptions, LossTraits(bounds_ratio=True))
def soft_clip(inputs: LossInputs, options: SoftClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A exp(limit tanh(log r / limit))`` for each token."""
    log_ratio = inputs.log_ratio()
    bounded = options.limit * (log_ratio / options.limit).tanh()
    flags = {"beyond_limit": log_ratio.abs() > options.limit}  # Logged as a share of the tokens.
    return -inputs.token_advantages() * bounded.exp(), flags
