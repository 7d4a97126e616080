"""Each reward minus the mean of the other rewards of its group."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits, Groups
from rlmath.utils.lazy_torch import Tensor
from rlmath.utils.setting import Options


@ADVANTAGES.register("rloo", traits=AdvantageTraits(within_groups=True))
def rloo(
    rewards: Tensor,
    group_ids: Tensor,
    options: Options,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``r_i - mean of the other rewards of the group``.

    RLOO (arXiv:2402.14740). Computed as ``n / (n - 1)`` times ``dr_grpo``'s advantage, so a group
    of equal rewards gives exactly 0.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64.
        options: None.
        token_counts: Ignored.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored and in groups of one.
    """
    groups = Groups(rewards, group_ids)
    return (groups.center_rewards() * groups.sizes / (groups.sizes - 1).clamp(min=1)).to(
        rewards.dtype
    )
