"""Rollout log-probs against the actor's: the gate, what is measured, and the correction."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlmath.algorithms.correction import CorrectionConfig, CorrectionKind, choose, correct
from rlmath.algorithms.mismatch import Mismatch, measure, measure_by_lag
from rlmath.config.schema import OnMisalignment
from rlmath.monitor import Monitor
from rlmath.training.gate import AlignmentError
from rlmath.training.session import Session
from rlmath.types import TrainingBatch

# The metrics of a Mismatch that say what importance weights would do.
_WEIGHTS = ("mean_w", "p99_w", "k3", "effective_sample_size")

# A curve holds numbers: the kinds in the order of the settings, ``none`` is 0.
KIND_NUMBERS: dict[CorrectionKind, int] = {
    kind: number
    for number, kind in enumerate(k for k in CorrectionKind if k is not CorrectionKind.auto)
}


def check_mismatch(
    session: Session,
    log_probs: Tensor,
    batch: TrainingBatch,
    monitor: Monitor,
    step: int,
    *,
    gate: bool,
    updated: bool = False,
) -> dict[str, float]:
    """Measure the mismatch, overall and by the age of the weights, and apply the gate.

    Tokens sampled by older weights differ for a good reason: ``alignment/...`` leaves them out.

    Args:
        log_probs: ``[R]`` of the actor before the first update, in nats.
        batch: With the rollout log-probs of the same tokens.
        gate: Whether a difference above the limit fails the run (``alignment.on_fail``).
        updated: The actor's weights have changed since ``log_probs`` were taken.

    Returns:
        ``alignment/...`` and ``mismatch/...``.

    Raises:
        AlignmentError: The difference is above the limit.
    """
    config, now = session.config, session.sampling.pool.weights_version
    fresh = torch.repeat_interleave(batch.weights_versions == now, batch.response_lengths)
    alignment = {}
    if fresh.any():
        found = measure(log_probs, batch.engine_log_probs, fresh).metrics()
        alignment = {f"alignment/{name}": value for name, value in found.items()}
    if gate and alignment:
        mean = alignment["alignment/mean_exp_abs_diff"]
        try:
            alignment |= session.gate.check(
                session, log_probs, batch, mean, step=step, updated=updated
            )
        except AlignmentError as error:
            if config.alignment.on_fail is OnMisalignment.stop:
                raise
            monitor.warn(f"step {step}: {error}")
    if batch.loss_mask.all() and fresh.all():
        # The same tokens: tens of millions of them are not measured twice.
        return alignment | {f"mismatch/{name}": alignment[f"alignment/{name}"] for name in _WEIGHTS}
    return alignment | mismatch_metrics(log_probs, batch, now)


def mismatch_metrics(log_probs: Tensor, batch: TrainingBatch, now: int) -> dict[str, float]:
    """What importance weights would do on the tokens of the loss.

    Args:
        log_probs: ``[R]`` of the actor before the update, in nats.
        batch: With the rollout log-probs.
        now: The actor's weights version; samples of older ones lag behind.
    """
    lags = now - batch.weights_versions
    by_lag = measure_by_lag(
        log_probs, batch.engine_log_probs, batch.response_lengths, lags, batch.loss_mask
    )
    total: Mismatch | None = None
    for one in by_lag.values():
        total = one if total is None else total + one
    assert total is not None
    found = total.metrics()
    metrics = {f"mismatch/{name}": found[name] for name in _WEIGHTS}
    if set(by_lag) != {0}:
        for lag, one in by_lag.items():
            found = one.metrics()
            metrics |= {f"mismatch/lag_{lag}/{name}": found[name] for name in _WEIGHTS}
            metrics[f"mismatch/lag_{lag}/token_count"] = float(one.tokens)
    return metrics


def apply_correction(
    batch: TrainingBatch, settings: CorrectionConfig, monitor: Monitor, step: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with policy factors against the mismatch, from whole sequences.

    ``auto`` records which kind it chose, and why.

    Args:
        batch: With ``old_log_probs``, unless nothing is corrected.

    Returns:
        The batch and ``correction/...``.
    """
    if not settings.is_on:
        return batch, {}
    assert batch.old_log_probs is not None
    if settings.kind is CorrectionKind.auto:
        seen = measure(batch.old_log_probs, batch.engine_log_probs, batch.loss_mask)
        kind, reason = choose(seen)
        monitor.note(step, "algorithm.correction.kind=auto", kind.value, reason)
        settings = dataclasses.replace(settings, kind=kind)
    found = correct(
        batch.old_log_probs,
        batch.engine_log_probs,
        batch.loss_mask,
        batch.response_lengths,
        settings,
    )
    metrics = {f"correction/{name}": value for name, value in found.metrics.items()}
    metrics["correction/kind"] = float(KIND_NUMBERS[found.kind])
    if not settings.is_on:
        return batch, metrics
    return dataclasses.replace(batch, policy_factors=found.weights.float()), metrics
