"""Rewards minus their group's mean, whitened over the tokens of the whole batch."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import (
    ADVANTAGES,
    AdvantageTraits,
    EpsilonOptions,
    Groups,
    needs_token_counts,
)
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.utils.lazy_torch import Tensor


@ADVANTAGES.register(
    "reinforce_pp_baseline",
    EpsilonOptions,
    AdvantageTraits(before_whitening=Groups.center_rewards),
)
def reinforce_pp_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    options: EpsilonOptions,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``a = r - mean of the group``, then ``(a - mean) / std`` over all tokens of the batch.

    REINFORCE++ with baseline (arXiv:2501.03262), as in ProRLv2: the group gives the baseline and
    the batch the scale, so problems that are nearly always solved are not magnified.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64.
        options: ``epsilon`` is added to the standard deviation.
        token_counts: ``[N]`` response tokens in the loss.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored.

    Raises:
        ValueError: ``token_counts`` is missing.
    """
    groups = Groups(rewards, group_ids)
    counts = needs_token_counts("reinforce_pp_baseline", token_counts)
    return whiten(groups.center_rewards(), counts * groups.scored, options.epsilon).to(
        rewards.dtype
    )
