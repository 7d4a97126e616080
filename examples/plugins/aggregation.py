"""An aggregation: a sequence of n tokens counts as much as the root of n.

rlmath train experiment=quickstart algorithm.aggregation=examples/plugins/aggregation.py:sqrt_length
"""

from __future__ import annotations

from torch import Tensor

from rlmath.algorithms.aggregation import AGGREGATIONS, AggregationTraits, Whole


@AGGREGATIONS.register("sqrt_length", traits=AggregationTraits(Whole.sequences))
def sqrt_length(counts: Tensor, groups: Tensor, length: int | None) -> Tensor:
    """``1 / (S sqrt(n_i))`` for each token, ``S`` the sequences of the minibatch with any token."""
    return 1.0 / ((counts > 0).sum() * counts.sqrt()).clamp(min=1)
