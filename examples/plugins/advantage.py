"""An advantage estimator: each reward less the median of its group.

rlmath train experiment=quickstart algorithm.advantage=examples/plugins/advantage.py:median
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.advantages import ADVANTAGES, AdvantageTraits
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class MedianOptions(Options):
    scale: float = setting(1.0, "Factor of the advantages.", above=0)


@ADVANTAGES.register("median", MedianOptions, AdvantageTraits(within_groups=True))
def median(
    rewards: Tensor,
    group_ids: Tensor,
    options: MedianOptions,
    *,
    token_counts: Tensor | None = None,
) -> Tensor:
    """``scale (r - median of the group's scored rewards)``; 0 where unscored."""
    found = torch.zeros_like(rewards)
    for group in group_ids.unique():
        mine = (group_ids == group) & ~rewards.isnan()
        if mine.any():
            found[mine] = options.scale * (rewards[mine] - rewards[mine].quantile(0.5))
    return found
