"""An aggregation: a sequence of n tokens counts as much as n to a power below 1.

rlmath train experiment=quickstart \\
    algorithm.aggregation=examples/plugins/aggregation.py:power_length
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmath.algorithms.aggregation import AGGREGATIONS, AggregationTraits, Whole
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class PowerOptions(Options):
    power: float = setting(0.5, "Exponent of a sequence's tokens.", least=0, most=1)


@AGGREGATIONS.register("power_length", PowerOptions, AggregationTraits(Whole.sequences))
def power_length(
    counts: Tensor, groups: Tensor, length: int | None, options: PowerOptions
) -> Tensor:
    """``n_i^(power - 1) / S`` for each token, ``S`` the sequences of the minibatch with any."""
    return counts.clamp(min=1) ** (options.power - 1) / (counts > 0).sum().clamp(min=1)
