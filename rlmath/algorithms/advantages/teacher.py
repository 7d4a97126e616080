"""No advantage from rewards: only the teacher's term for each token."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import AdvantageTraits, Groups, estimator
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options


@estimator("teacher", traits=AdvantageTraits(compares=False, reads_rewards=False))
def teacher(groups: Groups, options: Options) -> Tensor:
    """0 for each sequence: the advantage is only the teacher's term (``algorithm.distill_coef``).

    On-policy distillation as in "On-Policy Distillation" (Thinking Machines Lab, 2025): no group is
    compared, and no verifier is needed.
    """
    return torch.zeros_like(groups.rewards)
