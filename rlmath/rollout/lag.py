"""Age of the weights that sampled a step's tokens, and the bias of ages on lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlmath.types import Group, Sample


def lag_metrics(groups: Sequence[Group], now: int) -> dict[str, float]:
    """``rollout/lag_...`` over the sampled tokens, and the share of samples with several versions.
    Returns empty without tokens. The lag of a token is in steps: ``now`` minus the version that
    sampled it. ``now``: the actor's weights version before the update."""
    samples = [graded.sample for group in groups for graded in group.samples]
    lags: Counter[int] = Counter()
    for sample in samples:
        ends = [start for _, start in sample.spans[1:]] + [len(sample.token_ids)]
        own = sample.model_mask()
        for (version, start), end in zip(sample.spans, ends, strict=True):
            lags[now - version] += int(own[start:end].sum())
    if not lags.total():
        return {}
    values, counts = np.array(sorted(lags.items())).T
    shares = np.cumsum(counts) / counts.sum()
    spans = np.array([len(sample.spans) for sample in samples])
    return {
        "rollout/lag_mean": float((values * counts).sum() / counts.sum()),
        "rollout/lag_p50": float(values[np.searchsorted(shares, 0.5)]),
        "rollout/lag_p99": float(values[np.searchsorted(shares, 0.99)]),
        "rollout/lag_max": float(values[-1]),
        "rollout/spans_mean": float(spans.mean()),
        "rollout/mixed_sample_share": float((spans > 1).mean()),
    }


@dataclass
class LengthTotals:
    """Lengths of responses over a run, the input of :meth:`bias`."""

    # Number of responses in the groups finished so far, and of their tokens.
    finished: tuple[int, int] = (0, 0)
    trained: tuple[int, int] = (0, 0)  # The same for those that were trained on.

    def add(self, finished: Iterable[Group], trained: Iterable[Group]) -> None:
        self.finished = _plus(self.finished, _samples(finished))
        self.trained = _plus(self.trained, _samples(trained))

    def bias(self, live: Iterable[Sample]) -> dict[str, float]:
        """``rollout/length_bias``: mean length of trained responses divided by that of all admitted
        ones, minus 1.

        For unfinished responses only a lower bound of the length is known. The mean is then
        estimated as all tokens over finished responses (exponential lifetimes with censoring).

        Args:
            live: Samples of unfinished groups, cut ones with the tokens so far.

        Returns:
            Empty before anything was trained on, or while no response is known to be finished.
        """
        live = list(live)
        tokens = _plus(self.finished, live)[1]
        count = _plus(self.finished, [one for one in live if one.finish_reason != "cut"])[0]
        if not self.trained[0] or not tokens or not count:
            return {}
        trained = self.trained[1] / self.trained[0]
        return {"rollout/length_bias": trained / (tokens / count) - 1}


def _samples(groups: Iterable[Group]) -> Iterable[Sample]:
    return (graded.sample for group in groups for graded in group.samples)


def _plus(totals: tuple[int, int], samples: Iterable[Sample]) -> tuple[int, int]:
    lengths = [len(one.token_ids) for one in samples]
    return totals[0] + len(lengths), totals[1] + sum(lengths)
