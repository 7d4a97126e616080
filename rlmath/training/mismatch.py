"""Rollout log-probs against the actor's: measurement and correction."""

from __future__ import annotations

import dataclasses

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import (
    AUTO,
    CORRECTIONS,
    CorrectionConfig,
    CorrectionTotals,
    choose,
)
from rlmath.algorithms.mismatch import Mismatch
from rlmath.monitor import Monitor

# The metrics of a Mismatch about the effect of importance weights.
_WEIGHTS = ("mean_w", "p99_w", "k3", "effective_sample_size")

# A curve holds numbers: the kinds in the order of the settings, ``none`` is 0.


def kind_numbers() -> dict[str, int]:
    """Number of each kind in the metrics; a plug-in's correction comes after rlmath's own."""
    kinds = [name for name in CORRECTIONS.in_order() if name != AUTO]
    return {kind: number for number, kind in enumerate(kinds)}


def alignment_metrics(alignment: Alignment) -> dict[str, float]:
    """``alignment/...``: how far engine and actor are apart under the same weights; nothing when
    all tokens are of older ones, which differ for a good reason."""
    if not alignment.fresh.tokens:
        return {}
    return {f"alignment/{name}": value for name, value in alignment.fresh.metrics().items()}


def mismatch_metrics(alignment: Alignment | None) -> dict[str, float]:
    """``alignment/...``, and ``mismatch/...``: the effect of importance weights on the tokens of
    the loss, overall and by the age of the weights."""
    if alignment is None:
        return {}
    metrics = alignment_metrics(alignment) | _weights("mismatch", alignment.loss)
    if set(alignment.by_lag) != {0}:
        for lag, one in alignment.by_lag.items():
            metrics |= _weights(f"mismatch/lag_{lag}", one)
            metrics[f"mismatch/lag_{lag}/token_count"] = float(one.tokens)
    return metrics


def _weights(name: str, mismatch: Mismatch) -> dict[str, float]:
    found = mismatch.metrics()
    return {f"{name}/{key}": found[key] for key in _WEIGHTS}


def choose_correction(
    settings: CorrectionConfig, seen: Mismatch, monitor: Monitor, step: int
) -> CorrectionConfig:
    """The settings of a correction, with ``auto`` resolved; which it chose is recorded. ``seen``:
    over the tokens of the loss."""
    if settings.kind != AUTO:
        return settings
    kind, reason = choose(seen)
    monitor.note(step, "algorithm.correction.kind=auto", kind, reason)
    return dataclasses.replace(settings, kind=kind)


def correction_metrics(
    settings: CorrectionConfig | None, totals: CorrectionTotals | None
) -> dict[str, float]:
    """``correction/...``; nothing without a correction."""
    if settings is None or totals is None:
        return {}
    metrics = {f"correction/{name}": value for name, value in totals.metrics().items()}
    return metrics | {"correction/kind": float(kind_numbers()[CORRECTIONS.name(settings.kind)])}
