"""Group mean as the baseline, the batch's standard deviation as the scale."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import EpsilonOptions, Groups, estimator
from rlmath.utils.lazy_torch import Tensor, torch


@estimator("batch_std", EpsilonOptions)
def batch_std(groups: Groups, options: EpsilonOptions) -> Tensor:
    """``(r - mean of the group) / (std of all rewards + epsilon)``.

    Lite PPO ("Tricks or Traps", arXiv:2508.08221): dividing by the standard deviation of the whole
    batch does not magnify a group in which one sample differs by chance. Bessel's standard
    deviation, over samples.
    """
    scored = groups.rewards[groups.scored]
    std = scored.std() if scored.numel() > 1 else torch.zeros((), dtype=torch.float64)
    return groups.center_rewards() / (std + options.epsilon)
