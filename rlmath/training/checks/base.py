"""The interface of a step check, and the data of a step that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.algorithms.alignment import Alignment
from rlmath.config.schema import Config, OnMisalignment
from rlmath.device.residue import Residue
from rlmath.errors import UserError
from rlmath.monitor import Monitor
from rlmath.plugins import NoTraits, Registry
from rlmath.types import Group

if TYPE_CHECKING:
    from rlmath.actor.plan import StepPlan
    from rlmath.actor.rank_step import StepResult
    from rlmath.actor.settings import UpdateResult
    from rlmath.training.opening import Running, RunningRanks
    from rlmath.training.step_batch import StepBatch
    from rlmath.weights.gather import WeightChanges

Metrics = dict[str, float]


class InvariantError(UserError):
    """A step violates an invariant."""


@dataclass(frozen=True)
class BeforeUpdate:
    """A step with its samples and the forward passes before its update.

    Attributes:
        run: Ranks and engines.
        monitor: Takes warnings.
        step: From 1.
        plan: Plan of the step.
        finished: All groups that were sampled and graded.
        groups: Groups to train on, in the order of the batch.
        batch: The sequences to train on; ``None``: the step is skipped.
        alignment: The actor's log-probs compared with the rollout's; ``None``: not computed.
    """

    run: Running
    monitor: Monitor
    step: int
    plan: StepPlan
    finished: Sequence[Group]
    groups: Sequence[Group]
    batch: StepBatch | None
    alignment: Alignment | None = None


@dataclass(frozen=True)
class AfterUpdate:
    """A step after its update.

    Attributes:
        run: The ranks; ``rlmath replay`` has no engines.
        monitor: Takes warnings.
        step: From 1.
        plan: Plan of the step.
        batch: The sequences that were trained on.
        report: Report of the ranks.
        changes: Changes of each rank's weights, see ``ActorGroup.weights_changes``.
        metrics: Metrics of the update.
    """

    run: RunningRanks
    monitor: Monitor
    step: int
    plan: StepPlan
    batch: StepBatch
    report: StepResult
    changes: Sequence[WeightChanges]
    metrics: Metrics

    @property
    def result(self) -> UpdateResult | None:
        """Result of the policy's update; ``None``: it was not updated."""
        return self.report.policy


@dataclass(frozen=True)
class AfterSync:
    """A step after its weight sync.

    Attributes:
        run: Ranks and engines.
        monitor: Takes warnings.
        step: From 1.
        compared_all: The engines' weights have all been compared with the actor's.
        asleep: Memory of each rank's GPU in use while the engines slept.
        beside_engines: Memory that each rank kept after offloading; empty: nothing is offloaded.
        wake_overlapped: Engines woke while ranks copied; see ``rlmath.rollout.wake_room``.
    """

    run: Running
    monitor: Monitor
    step: int
    compared_all: bool
    asleep: Sequence[Residue] = ()
    beside_engines: Sequence[Residue] = ()
    wake_overlapped: bool = False


class StepCheck:
    """A check of every step. A new one is a file with a subclass, and a line in ``catalog.py``; one
    of a plug-in is registered in ``STEP_CHECKS`` and called after those.

    Each method returns metrics, or raises an error with the place and the numbers.
    """

    def before_update(self, now: BeforeUpdate) -> Metrics:
        """Check the samples."""
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        """Judge the update."""
        return {}

    def after_sync(self, now: AfterSync) -> Metrics:
        """Check the engines after the weight sync."""
        return {}

    def close(self) -> None:
        """The run has ended."""


# Checks of plug-ins: each is called in every step of a run that imports it.
STEP_CHECKS: Registry[Callable[[], StepCheck], NoTraits] = Registry("step check", NoTraits)


class StepChecks:
    """The checks of a run, called in order."""

    def __init__(self, checks: Sequence[StepCheck]) -> None:
        self._checks = tuple(checks)

    def before_update(self, now: BeforeUpdate) -> Metrics:
        """See :class:`StepCheck`."""
        return _merge([one.before_update(now) for one in self._checks])

    def after_update(self, now: AfterUpdate) -> Metrics:
        """See :class:`StepCheck`."""
        return _merge([one.after_update(now) for one in self._checks])

    def after_sync(self, now: AfterSync) -> Metrics:
        """See :class:`StepCheck`."""
        return _merge([one.after_sync(now) for one in self._checks])

    def close(self) -> None:
        """See :class:`StepCheck`."""
        for one in self._checks:
            one.close()


def _merge(metrics: Sequence[Metrics]) -> Metrics:
    return {name: value for one in metrics for name, value in one.items()}


def report(config: Config, broken: Sequence[str], step: int, monitor: Monitor) -> None:
    """Fail, or warn, as ``alignment.on_fail`` says, if any invariant is violated.

    Raises:
        InvariantError: With ``alignment.on_fail=stop``.
    """
    if not broken:
        return
    message = f"step {step}: " + "; ".join(broken)
    if config.alignment.on_fail is OnMisalignment.stop:
        raise InvariantError(
            f"{message}. These invariants hold for any data, so the step did not train what the "
            "settings say; alignment.on_fail=warn continues with a warning"
        )
    monitor.warn(message)
