"""Rewards minus their group's mean, whitened over the tokens of the whole batch."""

from __future__ import annotations

from rlmath.algorithms.advantages.base import EpsilonOptions, Groups, estimator
from rlmath.utils.lazy_torch import Tensor


@estimator("reinforce_pp_baseline", EpsilonOptions, whitens_tokens=True)
def reinforce_pp_baseline(groups: Groups, options: EpsilonOptions) -> Tensor:
    """``a = r - mean of the group``, then ``(a - mean) / std`` over all tokens of the batch.

    REINFORCE++ with baseline (arXiv:2501.03262), as in ProRLv2: the group gives the baseline and
    the batch the scale, so problems that are nearly always solved are not magnified.
    """
    return groups.center_rewards()
