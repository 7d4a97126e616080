"""Optimizer steps: the learning rate of the schedule, and Adam's use of gradient and moments.

The driver counts the steps and computes the rate separately. The ranks look at a few elements
around each step (``rlmath/actor/step_probe.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from rlmath.actor.step_probe import FINDINGS, NO_SHARE, OTHER_SLOPE, StepFinding, StepFindings
from rlmath.config.arithmetic import policy_updates
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.config.schema import Config, DType
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report


class OptimizerSteps(StepCheck):
    """Compares rates with the schedule, and reports findings of the ranks' probes."""

    def __init__(self) -> None:
        # Optimizer steps of the run; None: not known yet.
        self._taken: int | None = None
        # The step whose samples were seen; a replay has none, and may have other settings.
        self._step = 0

    def before_update(self, now: BeforeUpdate) -> Metrics:
        self._step = now.step
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.report.values is not None:
            found = wrong_steps(now.report.values.step_findings)
            report(now.run.config, [f"value model: {one}" for one in found], now.step, now.monitor)
        if now.result is None:
            return {}
        if self._taken is None:
            # The checkpoint of a resumed run was checked when it was loaded.
            self._taken = 0 if now.step == 1 else now.result.schedule_steps
        config, minibatches = now.run.config, now.result.minibatches
        findings = now.result.step_findings
        # In bfloat16, rounding is up to a third of what is measured: no reason to end a run.
        doubtful = config.model.dtype is DType.bfloat16
        if doubtful and (slopes := wrong_steps(findings, lambda kind: kind == OTHER_SLOPE)):
            now.monitor.warn(f"step {now.step}: {slopes[0]}")
        broken = wrong_steps(findings, lambda kind: not doubtful or kind != OTHER_SLOPE)
        if self._step == now.step:
            broken = wrong_rates(schedule_of(config), self._taken, minibatches) + broken
        self._taken += sum(not one["discarded"] for one in minibatches)
        report(config, broken, now.step, now.monitor)
        return {}


def schedule_of(config: Config) -> OptimizerConfig:
    """The optimizer's settings, with the end of the schedule."""
    optimizer = config.actor.optimizer
    steps = policy_updates(config)
    return dataclasses.replace(
        optimizer,
        decay_steps=optimizer.decay_steps or steps,
        warmup_steps=optimizer.warmup_of(steps),
    )


def scheduled_rate(settings: OptimizerConfig, taken: int) -> float:
    """Learning rate of the next optimizer step. ``settings``: with ``decay_steps``, unless the
    schedule is constant. ``taken``: steps before it."""
    peak, warmup = settings.lr, settings.warmup_of(settings.decay_steps or 0)
    if taken <= warmup and warmup:
        return peak * taken / warmup
    if settings.schedule is Schedule.constant:
        return peak
    end, floor = max(settings.decay_steps or 1, warmup + 1), min(settings.min_lr, peak)
    progress = min(1.0, (taken - warmup) / (end - warmup))
    left = 1.0 - progress
    if settings.schedule is Schedule.cosine:
        left = (1.0 + math.cos(math.pi * progress)) / 2
    return floor + left * (peak - floor)


def wrong_rates(
    settings: OptimizerConfig, taken: int, minibatches: Sequence[Mapping[str, float]]
) -> list[str]:
    """Sentences about minibatches whose learning rate is not the schedule's.

    Args:
        settings: See :func:`scheduled_rate`.
        taken: Optimizer steps before the first one.
    """
    broken = []
    for index, figures in enumerate(minibatches):
        wanted = scheduled_rate(settings, taken)
        # Written so that NaN is reported.
        if not abs(figures["lr"] - wanted) <= 1e-9 * settings.lr:
            broken.append(
                f"minibatch {index} has a learning rate of {figures['lr']:.6g}, but after {taken} "
                f"optimizer steps the {settings.schedule.value} schedule gives {wanted:.6g}: the "
                "schedule was changed or began again"
            )
        taken += not figures["discarded"]
    return broken


def wrong_steps(
    findings: StepFindings, wanted: Callable[[float], bool] = lambda _: True
) -> list[str]:
    """Sentences about optimizer steps that are not Adam's. ``findings``: rank and finding of its
    probe, for each minibatch. ``wanted``: kinds of findings to report."""
    return [
        f"minibatch {index}, rank {rank}{one.place and f', {one.place}'}: "
        f"{FINDINGS[int(one.kind)]} ({_figures(one)})"
        for index, (rank, one) in enumerate(findings)
        if one.kind and wanted(one.kind)
    ]


def _figures(one: StepFinding) -> str:
    if one.kind == NO_SHARE:
        return f"it gives exactly 0, and others up to {one.wanted:.7g}"
    return f"it is {one.found:.7g}, and should be {one.wanted:.7g}"
