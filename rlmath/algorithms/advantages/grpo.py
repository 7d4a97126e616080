"""Group-relative advantages: z-scores of rewards within a prompt's samples."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import ADVANTAGES, Groups
from rlmath.utils.lazy_torch import Tensor, torch


@ADVANTAGES.register("grpo")
def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    token_counts: Tensor | None = None,
    epsilon: float = 1e-6,
    leave_one_out: bool = False,
    leave_one_out_std: bool = False,
) -> Tensor:
    """``(r - mean) / (std + epsilon)`` within each group.

    GRPO (arXiv:2402.03300), §4.1.2; the standard deviation is Bessel's (divided by n - 1). A group
    of one, and a group whose rewards are all equal, gets 0.

    Args:
        rewards: ``[N]``, not-a-number where unscored.
        group_ids: ``[N]`` int64.
        token_counts: Not read.
        epsilon: Added to the standard deviation.
        leave_one_out: The baseline is the mean of the group's other samples, so that it does not
            depend on the sample's own reward; this multiplies advantages by ``n / (n - 1)``.
        leave_one_out_std: The standard deviation is that of the group's other samples as well, as
            in NeMo RL (``nemo_rl/algorithms/utils.py``). Where these are all equal, as for the one
            right answer of a group, the difference is left undivided, since dividing by
            ``epsilon`` would make a million of it.

    Returns:
        ``[N]``, of the rewards' dtype; 0 where unscored.
    """
    groups = Groups(rewards, group_ids)
    if leave_one_out_std:
        std = groups.std_of_others()
        advantages = groups.centered() / torch.where(std > 0, std + epsilon, 1.0)
    else:
        advantages = groups.centered() / (groups.std() + epsilon)
    if leave_one_out:
        advantages = advantages * groups.sizes / (groups.sizes - 1).clamp(min=1)
    return advantages.to(rewards.dtype)
