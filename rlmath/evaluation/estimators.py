"""Estimates from ``n`` samples of a problem: pass@k and maj@k, exact over all choices of ``k``.

Both give the expected result of ``k`` samples drawn without replacement from the ``n`` that exist.
Nothing is actually drawn, so the same samples give the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of ``k`` samples is right: ``1 - C(n - c, k) / C(n, k)``.

    The unbiased estimator of Chen et al. 2021 (Evaluating Large Language Models Trained on Code),
    equation 1. ``k``: size of a choice, of which one sample has to be right, from 1 to ``n``.
    Raises ValueError: ``k`` or ``correct`` is out of its range.
    """
    _check(samples, correct, k)
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def maj_at_k(correct: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Chance that the most frequent answer of ``k`` samples is the right one.

    Samples without an answer cast no vote, and ties are broken by lot: a right answer that is as
    frequent as ``u`` wrong ones wins with chance ``1 / (u + 1)``. The count is over all ``C(n, k)``
    choices: with ``t`` votes for the right answer each other answer may have at most ``t``, so the
    choices are the coefficients of a product of polynomials, one factor
    ``sum_a C(votes, a) x^a``, ``a <= t``, for each wrong answer.

    Args:
        wrong: Samples with each of the wrong answers.
        k: Samples that vote, from 1 to all of them.

    Raises:
        ValueError: ``k`` is out of its range.
    """
    samples = correct + sum(wrong) + silent
    _check(samples, correct, k)
    favorable = 0.0
    for votes in range(1, min(correct, k) + 1):
        rest = k - votes
        # ways[tied][size]: choices of `size` samples with `tied` wrong answers at `votes` votes.
        ways = [[comb(silent, size) for size in range(rest + 1)]]
        for count in wrong:
            ways = _with_answer(ways, count, votes, rest)
        won = sum(of_size[rest] / (tied + 1) for tied, of_size in enumerate(ways))
        favorable += comb(correct, votes) * won
    return favorable / comb(samples, k)


def mean_and_errors(correct: Sequence[int], samples: Sequence[int]) -> tuple[float, float, float]:
    """Accuracy over problems, and its standard errors. ``correct``: right samples of each problem.
    ``samples``: samples of each problem, at least 1.

    Returns:
        - the mean over problems of their shares of right samples (avg@n);
        - its standard error when the problems are drawn at random: ``s / sqrt(N)``, ``s`` the
          deviation (Bessel) of the problems' shares. The samples of a problem count as one
          cluster (Miller 2024, Adding Error Bars to Evals, section 2.2);
        - its standard error on these very problems, sampled again:
          ``sqrt(sum_i p_i (1 - p_i) / (n_i - 1)) / N``. NaN with one sample each.
    """
    shares = [c / n for c, n in zip(correct, samples, strict=True)]
    count = len(shares)
    mean = sum(shares) / count
    over_problems = over_samples = math.nan
    if count > 1:
        over_problems = math.sqrt(sum((p - mean) ** 2 for p in shares) / (count - 1) / count)
    if min(samples) > 1:
        variance = sum(p * (1 - p) / (n - 1) for p, n in zip(shares, samples, strict=True))
        over_samples = math.sqrt(variance) / count
    return mean, over_problems, over_samples


def ks_for(samples: int) -> list[int]:
    """The values of ``k`` reported for ``n`` samples: 2, 4, 8, ... and ``n`` itself."""
    powers = [2**i for i in range(1, samples.bit_length()) if 2**i <= samples]
    return powers if samples in powers or samples == 1 else [*powers, samples]


def _with_answer(ways: list[list[int]], count: int, votes: int, rest: int) -> list[list[int]]:
    """``ways`` with one more wrong answer, given by ``count`` samples."""
    may_tie = count >= votes
    longer = [[0] * (rest + 1) for _ in range(len(ways) + may_tie)]
    for tied, of_size in enumerate(ways):
        for size, number in enumerate(of_size):
            if not number:
                continue
            for taken in range(min(count, votes, rest - size) + 1):
                longer[tied + (taken == votes)][size + taken] += number * comb(count, taken)
    return longer


def _check(samples: int, correct: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: has to be from 1 to the number of samples, {samples}")
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct}: has to be from 0 to the number of samples, {samples}")
