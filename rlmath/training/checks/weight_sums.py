"""Weights of a minibatch's tokens in its loss, by the lengths alone.

The weights of a step's tokens are part of its shards, and a rank that lost a mask, divided by
its own tokens or averaged over ranks trains on something else while every curve looks alike. So the
ranks report the number of tokens in the loss, the sum of their weights and the sum of the squares;
the driver works the three out from the lengths, with separate formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmath.batching.minibatches import minibatches
from rlmath.batching.shards import Sequences
from rlmath.config.schema import Config
from rlmath.training.algorithm_settings import aggregation_constant

# Weights are float32, each rounded by up to 6e-8 of itself.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class WeightSums:
    tokens: int  # In the loss.
    total: float  # Sum of their weights.
    squares: float  # Sum of the squares of their weights.


# From the tokens of each sequence that has any, its group, and the constant length.
_Sums = Callable[[Sequence[int], Sequence[int], int], tuple[float, float]]


def _token_mean(counts: Sequence[int], groups: Sequence[int], length: int) -> tuple[float, float]:
    return 1.0, 1.0 / sum(counts)


def _seq_mean_token_mean(
    counts: Sequence[int], groups: Sequence[int], length: int
) -> tuple[float, float]:
    return 1.0, sum(1.0 / count for count in counts) / len(counts) ** 2


def _seq_mean_token_sum(
    counts: Sequence[int], groups: Sequence[int], length: int
) -> tuple[float, float]:
    return sum(counts) / len(counts), sum(counts) / len(counts) ** 2


def _seq_sum_constant(
    counts: Sequence[int], groups: Sequence[int], length: int
) -> tuple[float, float]:
    total, squares = _seq_mean_token_sum(counts, groups, length)
    return total / length, squares / length**2


def _prompt_mean(counts: Sequence[int], groups: Sequence[int], length: int) -> tuple[float, float]:
    tokens: Counter[int] = Counter()
    for count, group in zip(counts, groups, strict=True):
        tokens[group] += count
    return 1.0, sum(1.0 / of_group for of_group in tokens.values()) / len(tokens) ** 2


SUMS: dict[str, _Sums] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "seq_sum_constant": _seq_sum_constant,
    "prompt_mean": _prompt_mean,
}


def expected_sums(config: Config, sequences: Sequences, seed: int) -> list[WeightSums]:
    """Expected report of each minibatch of a step; nothing for an aggregation of a plug-in."""
    algorithm = config.algorithm
    if algorithm.aggregation not in SUMS:
        return []
    sums, length = SUMS[algorithm.aggregation], aggregation_constant(config)
    counts, groups = sequences.loss_token_counts.tolist(), sequences.group_ids.tolist()
    found = []
    for members in minibatches(groups, algorithm.minibatches_per_step, seed):
        there = [i for i in members if counts[i]]
        total, squares = 0.0, 0.0
        if there:
            total, squares = sums([counts[i] for i in there], [groups[i] for i in there], length)
        found.append(WeightSums(sum(counts[i] for i in there), total, squares))
    return found


def wrong_sums(
    expected: Sequence[WeightSums], reported: Sequence[Mapping[str, float]]
) -> list[str]:
    """A sentence for each minibatch that the ranks weighted otherwise. ``expected``: sums of each
    minibatch; empty: nothing is known. ``reported``: its metrics; those of minibatches that were
    not looked at are missing."""
    broken = []
    for index, (right, found) in enumerate(zip(expected, reported, strict=False)):
        tokens, total = found["token_count"], found["loss_weight"]
        squares = found["loss_weight_squares"]
        if tokens != right.tokens:
            broken.append(
                f"minibatch {index} has {tokens:.0f} tokens in the loss, but its lengths and masks "
                f"give {right.tokens}: a loss mask or sequences were lost"
            )
        elif not _near(total, right.total) or not _near(squares, right.squares):
            broken.append(
                f"the weights of the {right.tokens} tokens of minibatch {index} add up to "
                f"{total:.7g} (squares: {squares:.7g}), but algorithm.aggregation gives "
                f"{right.total:.7g} (squares: {right.squares:.7g}): the loss has a different "
                "denominator"
            )
    return broken


def _near(found: float, right: float) -> bool:
    # Written so that NaN is not near.
    return abs(found - right) <= TOLERANCE * abs(right)
