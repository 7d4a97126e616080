"""Rewards minus their group's mean, without dividing by the standard deviation."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits, Groups
from rlmath.utils.lazy_torch import Tensor
from rlmath.utils.setting import Options


@ADVANTAGES.register("dr_grpo", traits=AdvantageTraits(within_groups=True))
def dr_grpo(
    rewards: Tensor,
    group_ids: Tensor,
    options: Options,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``r - mean`` within each group.

    Dr. GRPO (arXiv:2503.20783), §3.2: dividing by the standard deviation gives more weight to
    problems that are nearly always or nearly never solved. Used with the aggregation
    ``seq_sum_constant``.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64.
        options: None.
        token_counts: Ignored.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored and in groups of one.
    """
    return Groups(rewards, group_ids).center_rewards().to(rewards.dtype)
