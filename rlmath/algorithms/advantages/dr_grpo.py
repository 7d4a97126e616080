"""Rewards minus their group's mean, without dividing by the standard deviation."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import AdvantageTraits, Groups, estimator
from rlmath.utils.lazy_torch import Tensor
from rlmath.utils.setting import Options


@estimator("dr_grpo", traits=AdvantageTraits(within_groups=True))
def dr_grpo(groups: Groups, options: Options) -> Tensor:
    """``r - mean`` within each group.

    Dr. GRPO (arXiv:2503.20783), §3.2: dividing by the standard deviation gives more weight to
    problems that are nearly always or nearly never solved. Used with the aggregation
    ``seq_sum_constant``.
    """
    return groups.center_rewards()
