"""No advantage from rewards: what a teacher says of each token is all there is."""

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
    """0 for each sequence: the advantage is the teacher's term alone (``algorithm.distill_coef``).

    On-policy distillation as in "On-Policy Distillation" (Thinking Machines Lab, 2025): no group is
    compared and no verifier needed.

    Args:
        rewards: ``[N]``, not read.
        group_ids: ``[N]`` int64, not read.
        options: None.
        token_counts: Not read.

    Returns:
        ``[N]`` zeros, of the rewards' dtype.
    """
    return torch.zeros_like(rewards)
