"""No advantage from rewards: only the teacher's term for each token."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, AdvantageTraits
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options


@ADVANTAGES.register("teacher", traits=AdvantageTraits(compares=False, reads_rewards=False))
def teacher(
    rewards: Tensor,
    group_ids: Tensor,
    options: Options,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """0 for each sequence: the advantage is only the teacher's term (``algorithm.distill_coef``).

    On-policy distillation as in "On-Policy Distillation" (Thinking Machines Lab, 2025): no group is
    compared, and no verifier is needed.

    Args:
        rewards: ``[N]``, ignored.
        group_ids: ``[N]`` int64, ignored.
        options: None.
        token_counts: Ignored.

    Returns:
        ``[N]`` zeros, in the rewards' dtype.
    """
    return torch.zeros_like(rewards)
