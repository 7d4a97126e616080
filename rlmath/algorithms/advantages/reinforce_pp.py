"""Rewards whitened over the tokens of the whole batch, with no baseline per prompt."""

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
    "reinforce_pp",
    EpsilonOptions,
    AdvantageTraits(compares=False, before_whitening=lambda groups: groups.rewards),
)
def reinforce_pp(
    rewards: Tensor,
    group_ids: Tensor,
    options: EpsilonOptions,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``(r - mean) / std`` over all response tokens of the batch.

    REINFORCE++ (arXiv:2501.03262), global normalization, with the KL term left to ``kl_coef``.
    Every token carries its sequence's reward, so a long sequence weighs more in the mean and the
    standard deviation.

    Args:
        rewards: ``[N]``, not-a-number where unscored.
        group_ids: ``[N]`` int64; they make no difference.
        options: What is added to the standard deviation.
        token_counts: ``[N]`` response tokens in the loss.

    Returns:
        ``[N]``, of the rewards' dtype; 0 where unscored.

    Raises:
        ValueError: ``token_counts`` is missing.
    """
    groups = Groups(rewards, group_ids)
    counts = needs_token_counts("reinforce_pp", token_counts)
    return whiten(groups.rewards, counts * groups.scored, options.epsilon).to(rewards.dtype)
