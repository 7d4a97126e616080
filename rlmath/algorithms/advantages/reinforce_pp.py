"""Rewards whitened over the tokens of the whole batch, without a baseline per prompt."""

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

    REINFORCE++ (arXiv:2501.03262), global normalization; the KL term is left to ``kl_coef``.
    Every token has its sequence's reward, so a long sequence has more weight in the mean and the
    standard deviation.

    Args:
        rewards: ``[N]``, NaN where unscored.
        group_ids: ``[N]`` int64; no effect.
        options: ``epsilon`` is added to the standard deviation.
        token_counts: ``[N]`` response tokens in the loss.

    Returns:
        ``[N]``, in the rewards' dtype; 0 where unscored.

    Raises:
        ValueError: ``token_counts`` is missing.
    """
    groups = Groups(rewards, group_ids)
    counts = needs_token_counts("reinforce_pp", token_counts)
    return whiten(groups.rewards, counts * groups.scored, options.epsilon).to(rewards.dtype)
