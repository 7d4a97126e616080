r"""Exact shares of causes in the change of a mean between two windows of steps.

A window's samples are followed through a chain of events. A sample belongs to a stratum ``s``: its
problem, if both windows sampled it, else its data file. Then it is cut off or not (``t``), an
answer is found or not (``a``), the grader has a verdict or another status (``g``), the verdict is
right or wrong (``c``), and its length falls into a quarter of all lengths (``b``). In window ``w``
a path ``x = (s, t, a, g, c, b)`` has the probability

    p_w(x) = P_w(s) P_w(t|s) P_w(a|s,t) P_w(g|s,t,a) P_w(c|s,t,a,g) P_w(b|s,t,a,g,c)

by the window's frequencies. Of the samples with ``y = (s, t, a, g, c)`` the share ``n_w(y)`` has a
value at all, the filter kept the groups of the share ``f_w(y)`` of those (1 unless only trained
groups are meant), and ``P_w(b|y)`` is the frequency among what is left, which is worth
``Σ_k v_wk(x)`` on average, ``k`` the components of the reward. The mean of the window is exactly

    m(w) = Σ_x p_w(x) n_w(y) f_w(y) Σ_k v_wk(x) / Σ_x p_w(x) n_w(y) f_w(y).

``P(c|...)`` is two causes, of problems that both windows sampled and of the others; ``n`` belongs
to the grader's status, and ``f`` is the filter.

Each factor may be taken from either window: with the causes ``C`` from the later window and the
others from the earlier one, ``m(C)`` is a number, ``m(∅)`` the mean before and ``m(all)`` the mean
after. A cause's share is its Shapley value, the mean over all orders of replacing one factor after
the other of what its replacement changes:

    φ_i = Σ_{C without i} |C|! (n - |C| - 1)! / n! · (m(C + i) - m(C)).

The shares add up to ``m(all) - m(∅)``, whatever the factors are (Shapley, 1953, efficiency). ``m``
is a sum over components, so each component is computed with the other causes alone.

Where a window never came to a node of the chain, its next probability is the other window's: what
was not seen is not said to have changed. A component's value on a path that it did not see is the
window's own mean over all strata with the same events, if it has one.

Standard errors are of the bootstrap over groups (all samples of a problem in a step), each window
separately.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlmath.commands.explain.outcomes import REST, Outcome
from rlmath.errors import UserError

Metric = Literal["reward", "accuracy", "length"]
METRICS: tuple[Metric, ...] = ("reward", "accuracy", "length")
# The causes that are probabilities.
PROBLEMS, FILTER, TRUNCATION, NO_ANSWER, GRADER, SKILL, UNMATCHED, LENGTH = (
    "problems drawn",
    "filter",
    "truncation",
    "no answer found",
    "grader status",
    "skill on problems of both windows",
    "right answers on other problems",
    "length",
)
CHAIN = (PROBLEMS, FILTER, TRUNCATION, NO_ANSWER, GRADER, SKILL, UNMATCHED, LENGTH)
# Difficulties of a group, by its share of right answers, from hard to easy.
DIFFICULTIES = ("none right", "up to half right", "more than half right", "all right")
_OUTCOME = "outcome"
REPLICATES = 100
_BINS = 4
_TOP = 10


@dataclass(frozen=True)
class Cause:
    """A cause's share of the change, in the metric's unit, with its standard error."""

    name: str
    share: float
    standard_error: float


@dataclass(frozen=True)
class Moved:
    """A group of the later window and its contribution to the change."""

    addresses: list[str]  # STEP/PROBLEM/INDEX of its samples.
    before: float  # Mean of the earlier window on the same stratum, or of all if it had none.
    now: float
    part: float


@dataclass(frozen=True)
class Explanation:
    metric: Metric
    before: float
    after: float
    standard_error: float
    samples: tuple[int, int]  # Samples that count in each window.
    shared_problems: int
    shared_samples: float  # Share of all samples that belong to these problems.
    causes: list[Cause]  # Largest first; the shares add up to after - before.
    moved: list[Moved]  # Groups that moved the mean most in the direction of the change.
    # Where no problem was sampled in both windows: shares of both windows' groups by how many of
    # their verdicts are right.
    difficulty: dict[str, tuple[float, float]]

    @property
    def change(self) -> float:
        return self.after - self.before


def explain(
    before: Sequence[Outcome],
    after: Sequence[Outcome],
    metric: Metric = "reward",
    *,
    trained_only: bool = False,
    replicates: int = REPLICATES,
) -> Explanation:
    """Split the change of a mean; see the module's docstring. ``trained_only``: groups that the
    filter dropped do not count, and the filter is a cause. Raises UserError: no sample of a window
    counts."""
    table = _Table(before, after, metric, trained_only)
    ones = np.ones(len(before) + len(after))
    means, shares = table.shares(ones)
    random = np.random.default_rng(0)
    drawn = [table.shares(table.resample(random)) for _ in range(replicates)]
    spread = np.nanstd([found for _, found in drawn], axis=0, ddof=1) if replicates > 1 else None
    changes = [pair[1] - pair[0] for pair, _ in drawn]
    causes = [
        Cause(name, float(share), float(spread[i]) if spread is not None else math.nan)
        for i, (name, share) in enumerate(zip(table.names, shares, strict=True))
        if name != _OUTCOME
    ]
    shared = {one.problem for one in before} & {one.problem for one in after}
    in_shared = sum(one.problem in shared for one in (*before, *after))
    return Explanation(
        metric=metric,
        before=means[0],
        after=means[1],
        standard_error=float(np.nanstd(changes, ddof=1)) if replicates > 1 else math.nan,
        samples=(int(table.counts[: len(before)].sum()), int(table.counts[len(before) :].sum())),
        shared_problems=len(shared),
        shared_samples=in_shared / (len(before) + len(after)),
        causes=sorted(causes, key=lambda cause: -abs(cause.share)),
        moved=table.top_moves(means),
        difficulty={} if shared else _difficulty(before, after),
    )


def _difficulty(
    before: Sequence[Outcome], after: Sequence[Outcome]
) -> dict[str, tuple[float, float]]:
    """Shares of the groups with verdicts in each of ``DIFFICULTIES``, in both windows."""
    windows = []
    for samples in (before, after):
        verdicts: dict[tuple[int, str], list[bool]] = defaultdict(list)
        for one in samples:
            if one.correct is not None:
                verdicts[one.group].append(one.correct)
        rates = [sum(right) / len(right) for right in verdicts.values()]
        counts = Counter((rate > 0) + (rate > 0.5) + (rate == 1) for rate in rates)
        windows.append([counts[i] / max(1, len(rates)) for i in range(len(DIFFICULTIES))])
    return dict(zip(DIFFICULTIES, zip(*windows, strict=True), strict=True))


class _Table:
    """The samples of both windows as paths."""

    def __init__(
        self,
        before: Sequence[Outcome],
        after: Sequence[Outcome],
        metric: Metric,
        trained_only: bool,
    ) -> None:
        self._all = [*before, *after]
        self._first = len(before)
        self._later = np.arange(len(self._all)) >= self._first
        shared = {one.problem for one in before} & {one.problem for one in after}
        strata = [
            ("problem", one.problem) if one.problem in shared else ("source", one.source)
            for one in self._all
        ]
        self._strata = _codes(strata)
        lengths = np.array([one.tokens for one in self._all], np.float64)
        self._values, parts = _values(self._all, metric, lengths)
        self._scored = ~np.isnan(self._values)
        kept = [not (trained_only and one.dropped) for one in self._all]
        self.counts = self._scored & np.array(kept)  # [N], whether a sample counts.
        for window, rows in (("earlier", ~self._later), ("later", self._later)):
            if not self.counts[rows].any():
                what = {"reward": "a reward", "accuracy": "a verdict"}.get(metric, "a length")
                raise UserError(f"no sample of the {window} window has {what} and counts")
        # Names of the causes, in the order of the shares: the chain, then components.
        self.names = [*CHAIN, *parts]
        self._parts = np.stack([np.where(self.counts, part, 0.0) for part in parts.values()])
        edges = np.quantile(lengths, np.arange(1, _BINS) / _BINS)
        bins = np.searchsorted(edges, lengths, side="left") if metric == "reward" else 0 * lengths
        events = [
            _codes([one.truncated for one in self._all]),
            _codes([one.no_answer for one in self._all]),
            _codes([one.status for one in self._all]),
            _codes([one.correct for one in self._all]),
            bins.astype(np.int64),
        ]
        # For each event, the node of each sample after it; the last one is its path.
        nodes = [self._strata]
        for event in events:
            nodes.append(_pair_numbers(nodes[-1], event))
        self._paths = nodes[-1]
        sizes = [int(node.max()) + 1 for node in nodes]
        # Any sample of a path tells the nodes on it.
        one_of: NDArray[np.int64] = np.zeros(sizes[-1], np.int64)
        one_of[self._paths] = np.arange(len(self._all))
        self._nodes = [(node[one_of], size, node) for node, size in zip(nodes, sizes, strict=True)]
        self._is_shared = np.array([kind == "problem" for kind, _ in strata])[one_of]
        # Outcomes and paths have the same events in all strata.
        same = events[0]
        self._alike = []
        for event in events[1:]:
            same = _pair_numbers(same, event)
            self._alike.append((same[one_of], int(same.max()) + 1, same))
        self._groups = [_codes([one.group for one in before]), _codes([one.group for one in after])]

    def resample(self, random: np.random.Generator) -> NDArray[np.float64]:
        """Weights of the samples: how often each group was drawn, each window separately."""
        weights = []
        for groups in self._groups:
            count = int(groups.max()) + 1
            weights.append(random.multinomial(count, np.full(count, 1 / count))[groups])
        return np.concatenate(weights).astype(np.float64)

    def shares(
        self, weights: NDArray[np.float64]
    ) -> tuple[tuple[float, float], NDArray[np.float64]]:
        """Means of both windows, and the share of each of ``names``."""
        windows = [np.where(self._later == later, weights, 0.0) for later in (False, True)]
        factors, values = self._factors(windows)
        n = len(CHAIN)
        masks = np.arange(1 << n)
        found = np.empty((1 << n, 2, len(values[0])))
        for mask in masks:
            product = np.multiply.reduce([factors[i][mask >> i & 1] for i in range(n)])
            whole = product.sum()
            for later in (0, 1):
                found[mask, later] = values[later] @ product / whole if whole > 0 else np.nan
        # Nothing counts in such a mixture of windows: it changes nothing.
        found = np.where(np.isnan(found), found[0, 0], found)
        means = float(found[0, 0].sum()), float(found[-1, 1].sum())
        return means, _shapley(found, n)

    def _factors(
        self, windows: Sequence[NDArray[np.float64]]
    ) -> tuple[list[list[NDArray[np.float64]]], list[NDArray[np.float64]]]:
        """For each cause of the chain the factor of each path in both windows; and for both windows
        the components ``[K, paths]``."""
        counted = [w * self.counts for w in windows]
        last = len(self._nodes) - 1
        steps = []
        for i in range(len(self._nodes)):
            # How long those are that count is seen on them alone.
            these = counted if i == last else windows
            whole = [w.sum() if i == 0 else _count(self._nodes[i - 1], w) for w in these]
            seen = [_count(self._nodes[i], w) for w in these]
            with np.errstate(divide="ignore", invalid="ignore"):
                both = [seen[k] / whole[k] for k in (0, 1)]
            steps.append([np.where(whole[k] > 0, both[k], both[1 - k]) for k in (0, 1)])
        steps = [[np.nan_to_num(one) for one in pair] for pair in steps]
        scored = self._means(self._scored.astype(np.float64), windows, -2)
        of_scored = [w * self._scored for w in windows]
        kept = self._means(self.counts.astype(np.float64), of_scored, -2)
        parts = [self._means(part, counted, -1) for part in self._parts]
        values = [np.stack([pair[k] for pair in parts]) for k in (0, 1)]
        ones = np.ones(len(self._is_shared))
        problems, truncated, answer, grader, correct, length = steps
        factors = [
            problems,
            kept,
            truncated,
            answer,
            [one * count for one, count in zip(grader, scored, strict=True)],
            [np.where(self._is_shared, one, ones) for one in correct],
            [np.where(self._is_shared, ones, one) for one in correct],
            length,
        ]
        return factors, values

    def _means(
        self, values: NDArray[np.float64], weights: Sequence[NDArray[np.float64]], level: int
    ) -> list[NDArray[np.float64]]:
        """The mean of ``values`` on each path in both windows, weighted by those of the windows: of
        the path, else of paths with the same events in the window, else of the other window.
        ``level``: -1: of paths; -2: of outcomes, without lengths."""
        by_path = [_mean(self._nodes[level], values, w) for w in weights]
        alike = [_mean(self._alike[level], values, w) for w in weights]
        result = []
        for k in (0, 1):
            own = np.where(np.isnan(by_path[k]), alike[k], by_path[k])
            own = np.where(np.isnan(own), by_path[1 - k], own)
            result.append(np.nan_to_num(np.where(np.isnan(own), alike[1 - k], own)))
        return result

    def top_moves(self, means: tuple[float, float]) -> list[Moved]:
        """The groups of the later window that moved the mean most."""
        size = int(self._strata.max()) + 1
        known = np.where(self.counts & ~self._later, 1.0, 0.0)
        values = np.where(self.counts, self._values, 0.0)
        sums, counts = (
            np.bincount(self._strata, weights, size) for weights in (known * values, known)
        )
        before = np.where(counts > 0, sums / np.maximum(counts, 1), means[0])[self._strata]
        count = (self.counts & self._later).sum()
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for i in np.flatnonzero(self.counts & self._later):
            groups[self._all[i].group].append(int(i))
        sign = 1 if means[1] >= means[0] else -1
        found = [
            Moved(
                [self._all[i].address for i in rows],
                float(before[rows[0]]),
                float(values[rows].mean()),
                float((values[rows] - before[rows]).sum() / count),
            )
            for rows in groups.values()
        ]
        found = [one for one in found if sign * one.part > 0]
        return sorted(found, key=lambda one: (-sign * one.part, one.addresses))[:_TOP]


def _values(
    samples: Sequence[Outcome], metric: Metric, lengths: NDArray[np.float64]
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """The value of each sample, NaN where it has none; and its components by name."""
    if metric == "length":
        return lengths, {f"{LENGTH} of responses alike": lengths}
    if metric == "accuracy":
        right = np.array([math.nan if s.correct is None else float(s.correct) for s in samples])
        return right, {_OUTCOME: np.nan_to_num(right)}
    names = dict.fromkeys(name for one in samples for name in one.parts)
    names.setdefault(REST)
    return np.array([math.nan if s.reward is None else s.reward for s in samples]), {
        name: np.array([one.parts.get(name, 0.0) for one in samples]) for name in names
    }


def _shapley(found: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Shapley values of the chain's causes, then of the components. ``found``: ``[2**n, 2, K]``, a
    component's part of the mean with the causes of a mask and its own values from the later window.
    """
    players = n + 1  # Of a component's game: the chain and its own values.
    masks = np.arange(1 << n)
    sizes = np.array([int(mask).bit_count() for mask in masks])
    weight = np.array(
        [
            math.factorial(k) * math.factorial(players - k - 1) / math.factorial(players)
            for k in range(players)
        ]
    )
    shares = []
    for i in range(n):
        without = masks[(masks >> i & 1) == 0]
        total = 0.0
        for later in (0, 1):
            change = found[without | 1 << i, later] - found[without, later]
            total += (weight[sizes[without] + later][:, None] * change).sum()
        shares.append(total)
    own = (weight[sizes][:, None] * (found[:, 1] - found[:, 0])).sum(axis=0)
    return np.array([*shares, *own])


def _count(
    nodes: tuple[NDArray[np.int64], int, NDArray[np.int64]], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The weight of the node of each path."""
    of_path, size, of_sample = nodes
    counts: NDArray[np.float64] = np.bincount(of_sample, weights, size)
    return counts[of_path]


def _mean(
    nodes: tuple[NDArray[np.int64], int, NDArray[np.int64]],
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The weighted mean over the samples of each path's node; NaN where there are none."""
    of_path, size, of_sample = nodes
    whole = np.bincount(of_sample, weights, size)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean: NDArray[np.float64] = np.bincount(of_sample, weights * values, size) / whole
    return mean[of_path]


def _codes(values: Sequence[Any]) -> NDArray[np.int64]:
    """Numbers from 0 for the values, by their first place."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)


def _pair_numbers(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of each pair, equal for equal pairs."""
    found: NDArray[np.int64] = np.unique(
        first * (int(second.max()) + 1) + second, return_inverse=True
    )[1]
    return found.reshape(-1)
