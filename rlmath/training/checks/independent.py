"""Check that a problem's samples are independent, by the probability of identical ones.

Two requests with one seed, or an engine that ignores seeds, give a group its samples twice, and
the group's advantages mean nothing. Identical responses alone prove nothing, as a confident policy
repeats itself. But the log-probs say how confident it is: given one response, another sample of the
problem is the same with the probability of that response.

Nor is a sample trained on in two steps: the seed of each belongs to one step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from rlmath.training.checks.base import BeforeUpdate, Metrics, StepCheck, report
from rlmath.types import Group, Sample

# Probability of a false alarm in each step.
CHANCE = 1e-9


# Steps in which a sample that was trained on is remembered.
REMEMBERED_STEPS = 16

# Problem, index and seed of a sample, which no two samples of a run share.
_Key = tuple[str, int, int]


class IndependentSamples(StepCheck):
    """Samples of a problem share no seed and are not identical beyond chance; each is trained on in
    one step."""

    def __init__(self) -> None:
        self._trained: deque[tuple[int, frozenset[_Key]]] = deque(maxlen=REMEMBERED_STEPS)

    def before_update(self, now: BeforeUpdate) -> Metrics:
        # All finished groups: the filter drops those whose samples are all equal.
        broken = dependent_samples([_samples(group) for group in now.finished])
        if now.batch is not None:
            own = [sample for group in now.groups for sample in _samples(group)]
            keys = frozenset((one.problem_id, one.index, one.seed) for one in own)
            broken += repeated_samples(keys, self._trained)
            self._trained.append((now.step, keys))
        report(now.run.config, broken, now.step, now.monitor)
        return {}


def repeated_samples(
    keys: frozenset[_Key], earlier: Iterable[tuple[int, frozenset[_Key]]]
) -> list[str]:
    """A sentence if a step trains on samples of an earlier one. ``keys``: keys of the step's
    samples. ``earlier``: steps, and the keys of their samples."""
    for step, trained in earlier:
        if again := keys & trained:
            problem, index, _ = min(again)
            return [
                f"{len(again)} of {len(keys)} samples were trained on before, in step {step} (such "
                f"as sample {index} of problem {problem}): groups were handed out twice"
            ]
    return []


def dependent_samples(groups: Sequence[Sequence[Sample]]) -> list[str]:
    """A sentence if samples of the same problem are not independent. ``groups``: the samples of
    each problem."""
    for samples in groups:
        first: dict[int, int] = {}
        for sample in samples:
            earlier = first.setdefault(sample.seed, sample.index)
            if earlier != sample.index:
                return [
                    f"samples {earlier} and {sample.index} of problem {sample.problem_id} have the "
                    f"same seed ({sample.seed})"
                ]
    # Pairs that share no sample are independent of each other.
    pairs = [pair for group in groups for pair in zip(group[::2], group[1::2], strict=False)]
    same = [(one, other) for one, other in pairs if _is_same(one, other)]
    if not same:
        return []
    log_chance = log_tail([one.log_prob() for one, _ in pairs], len(same))
    if log_chance >= math.log(CHANCE):
        return []
    rarest, copy = min(same, key=lambda pair: pair[0].log_prob())
    return [
        f"{len(same)} of {len(pairs)} pairs of samples of one problem are identical (such as "
        f"samples {rarest.index} and {copy.index} of problem {rarest.problem_id}). By their "
        f"log-probs, the chance of that is at most 1e{log_chance / math.log(10):.0f}: they are not "
        "independent"
    ]


def log_tail(log_probabilities: Sequence[float], count: int) -> float:
    """Bound of the log-probability that ``count`` or more of independent events happen.

    Chernoff's: ``min over s >= 0 of sum_i log(1 + p_i (exp(s) - 1)) - s count``.
    ``log_probabilities``: log-probability of each event. ``count``: from 1.
    """
    # NaN, from an engine that overflowed, is no evidence.
    logs = np.nan_to_num(np.asarray(log_probabilities, dtype=np.float64), nan=0.0)
    p = np.exp(np.minimum(logs, 0.0))
    # p below 1e-300 counts as that.
    p = np.maximum(p, 1e-300)
    # Any s gives a bound, and it is convex in s, so a second grid lies beside the first one's best.
    best, grid = 0.0, np.geomspace(1e-3, 800.0, 32)
    for _ in range(2):
        # log(1 + p (e^s - 1)), without an overflow of e^s.
        terms = np.logaddexp(np.log1p(-np.minimum(p, 1 - 1e-16)), np.log(p) + grid[:, None])
        bounds = terms.sum(1) - grid * count
        place = int(bounds.argmin())
        best = min(best, float(bounds[place]))
        grid = np.linspace(grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)], 32)
    return best


def _samples(group: Group) -> list[Sample]:
    return [graded.sample for graded in group.samples]


def _is_same(one: Sample, other: Sample) -> bool:
    return one.finish_reason == other.finish_reason and np.array_equal(
        one.token_ids, other.token_ids
    )
