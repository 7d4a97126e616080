"""Group mean as the baseline, the batch's standard deviation as the scale."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, EpsilonOptions, Groups
from rlmath.utils.lazy_torch import Tensor, torch


@ADVANTAGES.register("batch_std", EpsilonOptions)
def batch_std(
    rewards: Tensor,
    group_ids: Tensor,
    options: EpsilonOptions,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``(r - mean of the group) / (std of all rewards + epsilon)``.

    Lite PPO ("Tricks or Traps", arXiv:2508.08221): dividing by the standard deviation of the whole
    batch does not magnify a group in which one sample differs by chance. Bessel's standard
    deviation, over samples.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64.
        options: ``epsilon`` is added to the standard deviation.
        token_counts: Ignored.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored and in groups of one.
    """
    groups = Groups(rewards, group_ids)
    scored = groups.rewards[groups.scored]
    std = scored.std() if scored.numel() > 1 else torch.zeros((), dtype=torch.float64)
    return (groups.center_rewards() / (std + options.epsilon)).to(rewards.dtype)
