"""Rollout log-probs against the actor's: the gate, what is measured, and the correction."""

from __future__ import annotations

import dataclasses

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import (
    CorrectionConfig,
    CorrectionKind,
    CorrectionTotals,
    choose,
)
from rlmath.algorithms.mismatch import Mismatch
from rlmath.batching.shards import Sequences
from rlmath.config.schema import OnMisalignment
from rlmath.monitor import Monitor
from rlmath.training.gate import AlignmentError
from rlmath.training.session import Session

# The metrics of a Mismatch that say what importance weights would do.
_WEIGHTS = ("mean_w", "p99_w", "k3", "effective_sample_size")

# A curve holds numbers: the kinds in the order of the settings, ``none`` is 0.
KIND_NUMBERS: dict[CorrectionKind, int] = {
    kind: number
    for number, kind in enumerate(k for k in CorrectionKind if k is not CorrectionKind.auto)
}


def check_mismatch(
    session: Session,
    alignment: Alignment,
    sequences: Sequences,
    monitor: Monitor,
    step: int,
    *,
    gate: bool,
    updated: bool = False,
) -> dict[str, float]:
    """Log the mismatch, overall and by the age of the weights, and apply the gate.

    Tokens sampled by older weights differ for a good reason: ``alignment/...`` leaves them out.

    Args:
        alignment: Of the actor before the first update.
        sequences: Of the step.
        gate: Whether a difference above the limit fails the run (``alignment.on_fail``).
        updated: The actor's weights have changed since the log-probs were taken.

    Returns:
        ``alignment/...`` and ``mismatch/...``.

    Raises:
        AlignmentError: The difference is above the limit.
    """
    found = check_alignment(
        session, alignment, sequences, monitor, step, gate=gate, updated=updated
    )
    return found | mismatch_metrics(alignment)


def check_alignment(
    session: Session,
    alignment: Alignment,
    sequences: Sequences,
    monitor: Monitor,
    step: int,
    *,
    gate: bool,
    updated: bool = False,
) -> dict[str, float]:
    """Log how far engine and actor are apart under the same weights, and apply the gate; see
    :func:`check_mismatch`.

    Returns:
        ``alignment/...``; nothing when all tokens are of older weights.
    """
    if not alignment.fresh.tokens:
        return {}
    found = alignment.fresh.metrics()
    metrics = {f"alignment/{name}": value for name, value in found.items()}
    if gate:
        try:
            metrics |= session.gate.check(session, alignment, sequences, step=step, updated=updated)
        except AlignmentError as error:
            if session.config.alignment.on_fail is OnMisalignment.stop:
                raise
            monitor.warn(f"step {step}: {error}")
    return metrics


def mismatch_metrics(alignment: Alignment) -> dict[str, float]:
    """What importance weights would do on the tokens of the loss."""
    metrics = _weights("mismatch", alignment.loss)
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
    """The settings of a correction, with ``auto`` resolved; which it chose is recorded.

    Args:
        seen: Over the tokens of the loss.
    """
    if settings.kind is not CorrectionKind.auto:
        return settings
    kind, reason = choose(seen)
    monitor.note(step, "algorithm.correction.kind=auto", kind.value, reason)
    return dataclasses.replace(settings, kind=kind)


def correction_metrics(
    settings: CorrectionConfig | None, totals: CorrectionTotals | None
) -> dict[str, float]:
    """``correction/...``; nothing without a correction."""
    if settings is None or totals is None:
        return {}
    metrics = {f"correction/{name}": value for name, value in totals.metrics().items()}
    return metrics | {"correction/kind": float(KIND_NUMBERS[settings.kind])}
