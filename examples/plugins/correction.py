"""A mismatch correction: the importance weight of a token to a power below 1.

rlmath train experiment=quickstart algorithm.correction.kind=examples/plugins/correction.py:temper
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.correction import (
    CORRECTIONS,
    Bounds,
    CorrectionTraits,
    LogRatios,
    Weighted,
)
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class TemperedOptions(Options):
    power: float = setting(0.5, "Exponent of the weight.", above=0, most=1)


@CORRECTIONS.register("temper", TemperedOptions, CorrectionTraits(high=2.0))
def temper(ratios: LogRatios, bounds: Bounds, options: TemperedOptions) -> Weighted:
    """``min(w^power, high)``."""
    weights = (options.power * ratios.tokens).exp()
    return Weighted(weights.clamp(max=bounds.high), truncated=weights > bounds.high)
