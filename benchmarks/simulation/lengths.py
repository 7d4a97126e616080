"""Response lengths for a simulated run: log-normal, or those of a run's own samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlmath.engines.requests import Request
from rlmath.monitor.samples import data_id
from rlmath.rollout.imposed_lengths import log_level

# Deviations of the logarithm of a length: between problems, and between the samples of a problem.
# Published step times of RLinf's 1.5B recipe fit these with 3 ms a decode step
# (docs/records/performance.md).
PROBLEM_SD, OWN_SD = 0.5, 0.7


class Lengths:
    """Lengths of all samples of a run, by problem and index.

    Args:
        tokens: ``[problems, samples]``, in tokens.
    """

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.tokens = tokens

    def __call__(self, request: Request) -> int:
        """The length of a sample; problems are named by their number, and may come again."""
        return int(self.tokens[int(data_id(request.problem_id)), request.index])

    def quantile(self, share: float) -> int:
        """The length that this share of all samples does not exceed, in tokens."""
        return int(np.quantile(self.tokens, share))


def log_normal_lengths(
    problems: int, samples: int, mean: float, longest: int, seed: int = 0
) -> Lengths:
    """Log-normal lengths, truncated at the longest, with this mean."""
    draw = np.random.default_rng(seed)
    level = log_level(mean, longest, math.hypot(PROBLEM_SD, OWN_SD))
    of_problem = level + draw.normal(0, PROBLEM_SD, (problems, 1))
    own = draw.normal(0, OWN_SD, (problems, samples))
    return Lengths(np.clip(np.exp(of_problem + own), 1, longest).astype(np.int64))
