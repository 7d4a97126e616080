"""Rewards whitened over the tokens of the whole batch, without a baseline per prompt."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import AdvantageTraits, EpsilonOptions, Groups, estimator
from rlmath.utils.lazy_torch import Tensor


@estimator("reinforce_pp", EpsilonOptions, AdvantageTraits(compares=False), whitens_tokens=True)
def reinforce_pp(groups: Groups, options: EpsilonOptions) -> Tensor:
    """``(r - mean) / std`` over all response tokens of the batch.

    REINFORCE++ (arXiv:2501.03262), global normalization; the KL term is left to ``kl_coef``.
    """
    return groups.rewards
