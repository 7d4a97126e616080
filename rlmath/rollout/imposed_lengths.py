"""Response lengths of a benchmark, whatever the model says."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rlmath.engines.requests import Request

# Standard deviation of the logarithm of a length. Lengths of published runs on mathematics fit it
# (docs/records/performance.md).
SPREAD = 0.86


def with_imposed_length(request: Request, mean_tokens: int | None) -> Request:
    """The request, sampled to a length that its seed determines.

    Args:
        request: Its ``max_tokens`` are the longest length.
        mean_tokens: Mean of log-normal lengths that are truncated there; ``None``: all have the
            longest length.
    """
    longest = request.max_tokens
    if mean_tokens is not None:
        level = log_level(mean_tokens, longest, SPREAD)
        drawn = np.exp(np.random.default_rng(request.seed).normal(level, SPREAD))
        longest = max(1, min(longest, round(float(drawn))))
    return dataclasses.replace(request, max_tokens=longest, ignore_eos=True)


@functools.cache
def log_level(mean: float, longest: int, sd: float) -> float:
    """Mean logarithm of the log-normal lengths whose mean, truncated at the longest, is ``mean``.

    Args:
        mean: In tokens.
        longest: In tokens.
        sd: Standard deviation of the logarithm.
    """
    spread = np.random.default_rng(0).normal(0, sd, 100_000)
    low, high = 0.0, 25.0
    for _ in range(40):
        middle = (low + high) / 2
        cut = np.minimum(np.exp(middle + spread), longest)
        low, high = (middle, high) if cut.mean() < mean else (low, middle)
    return low
