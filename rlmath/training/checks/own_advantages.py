"""The advantages that the ranks trained with, computed a second time from rewards and groups.

The estimators are written again here, on plain lists and without a line of
``rlmath/algorithms/advantages``, so that a sign, a group or an order that is wrong on the way from
the samples to the loss shows as a difference. See the estimators for papers and equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Rewards of a group's samples; None: not scored.
Rewards = Sequence[float | None]


@dataclass(frozen=True)
class ScoredGroups:
    rewards: Sequence[Rewards]  # Rewards of each group's samples, in float32.
    # Rewards that gdpo normalizes separately, for each group and sample.
    separate: Sequence[Sequence[Rewards]]
    weights: Sequence[float]  # Weights of these rewards.
    tokens: Sequence[Sequence[int]]  # In the loss, of the samples of each group.
    options: Any  # Options of the estimator.


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float], times: Sequence[float] | None = None) -> float:
    """Standard deviation (Bessel's) of values, each with a number of occurrences."""
    counts = [1.0] * len(values) if times is None else times
    total = math.fsum(counts)
    if total <= 1:
        return 0.0
    mean = math.fsum(v * n for v, n in zip(values, counts, strict=True)) / total
    squares = math.fsum(n * (v - mean) ** 2 for v, n in zip(values, counts, strict=True))
    return math.sqrt(squares / (total - 1))


def _scored_rewards(rewards: Rewards) -> list[float]:
    return [one for one in rewards if one is not None]


def _less_mean(rewards: Rewards) -> list[float]:
    own = _scored_rewards(rewards)
    if not own or min(own) == max(own):
        return [0.0] * len(rewards)
    mean = _mean(own)
    return [0.0 if one is None else one - mean for one in rewards]


def _grpo(groups: ScoredGroups) -> list[list[float]]:
    options, found = groups.options, []
    for rewards in groups.rewards:
        own, deviation = _scored_rewards(rewards), _deviation(_scored_rewards(rewards))
        row = []
        for reward, difference in zip(rewards, _less_mean(rewards), strict=True):
            if reward is None or len(own) < 2:
                row.append(0.0)
                continue
            divisor = deviation + options.epsilon
            if options.leave_one_out_std:
                others = list(own)
                others.remove(reward)
                equal = min(others) == max(others)
                divisor = 1.0 if equal else _deviation(others) + options.epsilon
            factor = len(own) / (len(own) - 1) if options.leave_one_out else 1.0
            row.append(factor * difference / divisor)
        found.append(row)
    return found


def _dr_grpo(groups: ScoredGroups) -> list[list[float]]:
    return [_less_mean(rewards) for rewards in groups.rewards]


def _rloo(groups: ScoredGroups) -> list[list[float]]:
    found = []
    for rewards in groups.rewards:
        own = _scored_rewards(rewards)
        row = []
        for reward in rewards:
            if reward is None or len(own) < 2 or min(own) == max(own):
                row.append(0.0)
            else:
                row.append(reward - (math.fsum(own) - reward) / (len(own) - 1))
        found.append(row)
    return found


def _batch_std(groups: ScoredGroups) -> list[list[float]]:
    divisor = _deviation([r for one in groups.rewards for r in _scored_rewards(one)])
    divisor += groups.options.epsilon
    return [[one / divisor for one in _less_mean(rewards)] for rewards in groups.rewards]


def _whiten(
    values: Sequence[Sequence[float]], times: Sequence[Sequence[float]], epsilon: float
) -> list[list[float]]:
    """Whiten values, each with a number of occurrences; 0 if the deviation is 0."""
    flat = [v for row in values for v in row]
    counts = [float(n) for row in times for n in row]
    seen = [v for v, n in zip(flat, counts, strict=True) if n]
    if not seen or min(seen) == max(seen):
        return [[0.0] * len(row) for row in values]
    mean = math.fsum(v * n for v, n in zip(flat, counts, strict=True)) / math.fsum(counts)
    divisor = _deviation(flat, counts) + epsilon
    return [
        [(v - mean) / divisor if n else 0.0 for v, n in zip(row, own, strict=True)]
        for row, own in zip(values, times, strict=True)
    ]


def _tokens_of_scored(groups: ScoredGroups) -> list[list[float]]:
    return [
        [0.0 if reward is None else float(n) for reward, n in zip(rewards, tokens, strict=True)]
        for rewards, tokens in zip(groups.rewards, groups.tokens, strict=True)
    ]


def _reinforce_pp(groups: ScoredGroups) -> list[list[float]]:
    rewards = [[one or 0.0 for one in row] for row in groups.rewards]
    return _whiten(rewards, _tokens_of_scored(groups), groups.options.epsilon)


def _reinforce_pp_baseline(groups: ScoredGroups) -> list[list[float]]:
    return _whiten(_dr_grpo(groups), _tokens_of_scored(groups), groups.options.epsilon)


def _gdpo(groups: ScoredGroups) -> list[list[float]]:
    totals, present = [], []
    for rows in groups.separate:
        scores = [0.0] * len(rows)
        for column, weight in enumerate(groups.weights):
            rewards = [row[column] for row in rows]
            divisor = _deviation(_scored_rewards(rewards)) + groups.options.epsilon
            for place, one in enumerate(_less_mean(rewards)):
                scores[place] += weight * one / divisor
        totals.append(scores)
        present.append([float(any(one is not None for one in row)) for row in rows])
    return _whiten(totals, present, groups.options.epsilon)


def _pass_at_k(groups: ScoredGroups) -> list[list[float]]:
    options, found = groups.options, []
    for rewards in groups.rewards:
        size = len(_scored_rewards(rewards))
        k = min(options.k, size)
        right = sum(one > options.correct_above for one in _scored_rewards(rewards))
        row = []
        for reward in rewards:
            if reward is None:
                row.append(0.0)
                continue
            none_right = math.comb(size - right, k) / math.comb(size, k)
            divisor = math.sqrt(none_right * (1 - none_right)) + options.epsilon
            if reward > options.correct_above:
                row.append(none_right / divisor)
            else:
                others = math.comb(size - right - 1, k - 1) / math.comb(size - 1, k - 1)
                row.append((none_right - others) / divisor)
        found.append(row)
    return found


ESTIMATORS: dict[str, Callable[[ScoredGroups], list[list[float]]]] = {
    "batch_std": _batch_std,
    "dr_grpo": _dr_grpo,
    "gdpo": _gdpo,
    "grpo": _grpo,
    "pass_at_k": _pass_at_k,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "rloo": _rloo,
}


def own_advantages(
    name: str, groups: ScoredGroups, whiten_epsilon: float | None
) -> list[float] | None:
    """The advantage of each sample's tokens, group after group. Returns ``None``: a value model, a
    teacher or a plug-in gives the advantages.

    Args:
        whiten_epsilon: Whiten over the tokens in the loss after it; ``None``: do not.
    """
    estimate = ESTIMATORS.get(name)
    if estimate is None:
        return None
    found = estimate(groups)
    if whiten_epsilon is not None:
        found = _whiten(found, [[float(n) for n in row] for row in groups.tokens], whiten_epsilon)
    return [one for row in found for one in row]
