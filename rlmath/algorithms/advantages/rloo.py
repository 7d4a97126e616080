"""Each reward minus the mean of the other rewards of its group."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import AdvantageTraits, Groups, estimator
from rlmath.utils.lazy_torch import Tensor
from rlmath.utils.setting import Options


@estimator("rloo", traits=AdvantageTraits(within_groups=True))
def rloo(groups: Groups, options: Options) -> Tensor:
    """``r_i - mean of the other rewards of the group``.

    RLOO (arXiv:2402.14740). Computed as ``n / (n - 1)`` times ``dr_grpo``'s advantage, so a group
    of equal rewards gives exactly 0.
    """
    return groups.center_rewards() * groups.sizes / (groups.sizes - 1).clamp(min=1)
