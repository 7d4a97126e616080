"""A group filter: train on groups whose rewards are at least so far apart.

rlmath train experiment=quickstart algorithm.filter.keep=examples/plugins/group_filter.py:spread
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.filters import GROUP_FILTERS, FilterTraits, GroupScores
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class SpreadOptions(Options):
    least: float = setting(0.1, "Minimum of the highest less the lowest reward.", above=0)


@GROUP_FILTERS.register("spread", SpreadOptions, FilterTraits("little_spread", compares=True))
def spread(scores: GroupScores, options: SpreadOptions) -> bool:
    """Keep a group whose rewards differ by ``least`` or more."""
    return max(scores.rewards) - min(scores.rewards) >= options.least
