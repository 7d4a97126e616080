"""How old the weights were that sampled what a step trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlmath.types import Group


def lag_metrics(groups: Sequence[Group], now: int) -> dict[str, float]:
    """``rollout/lag_...`` over the response tokens, and how many samples have several versions.

    Args:
        groups: Of the step.
        now: The actor's weights version before the update.

    Returns:
        Nothing without tokens. The lag of a token is in steps: ``now`` less the version that
        sampled it.
    """
    samples = [graded.sample for group in groups for graded in group.samples]
    lags: Counter[int] = Counter()
    for sample in samples:
        ends = [start for _, start in sample.spans[1:]] + [len(sample.token_ids)]
        for (version, start), end in zip(sample.spans, ends, strict=True):
            lags[now - version] += end - start
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
