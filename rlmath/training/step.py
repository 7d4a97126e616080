"""One training step: take samples, have a teacher score them, update, sync, log.

The names of its phases are those of the metrics ``timing/...``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import StepResult
from rlmath.algorithms.alignment import Alignment
from rlmath.config.schema import Config
from rlmath.monitor import Monitor
from rlmath.rollout import weight_sync
from rlmath.rollout.round import Sampled
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import Verification
from rlmath.training.algorithm_settings import reference_share
from rlmath.training.checks.base import (
    AfterSync,
    AfterUpdate,
    BeforeUpdate,
    InvariantError,
    StepChecks,
)
from rlmath.training.controllers import Coefficients
from rlmath.training.digests import (
    add_fingerprints,
    digest_gradient,
    digest_sequences,
    digest_start,
    digest_values,
    digest_weights,
)
from rlmath.training.gate import AlignmentError
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.metrics import (
    batch_metrics,
    memory_by_phase,
    off_policy_metrics,
    rollout_metrics,
    update_metrics,
    value_metrics,
)
from rlmath.training.mismatch import correction_metrics, mismatch_metrics
from rlmath.training.opening import Running, RunningRanks
from rlmath.training.plan import complete, plan_step
from rlmath.training.step_batch import StepBatch
from rlmath.training.token_traces import traced_places, write_traces
from rlmath.types import Group, TrainingBatch


@dataclass(frozen=True)
class Trained:
    metrics: dict[str, float]  # Its metrics except the timings, which the monitor has.
    groups: Sequence[Group]  # Groups that it trained on.
    # Its runner.check_export_sequences shortest sequences; None when there are none.
    shortest: TrainingBatch | None


@dataclass(frozen=True)
class UpdateParts:
    """Parts of an update. A run does it once, and ``rlmath replay`` again."""

    run: RunningRanks  # The ranks.
    monitor: Monitor  # Times it, and takes digests and warnings.
    coefficients: Coefficients  # Coefficients of the loss, which an update may move.
    checks: StepChecks  # Judge each step.


@dataclass(frozen=True)
class StepParts(UpdateParts):
    run: Running  # Ranks and engines.
    source: GroupSource  # Gives each step its groups.
    kept: KeptBatches  # Takes each step's batch.
    # After which weight syncs the engines' weights are compared with the actor's.
    verification: Verification
    wake_room: WakeRoom  # Decides whether engines wake while ranks copy their state to the host.


def train_step(parts: StepParts, step: int, write: Callable[[], None] | None = None) -> Trained:
    """Take the step's groups, update from them, and sync the weights to the engines. ``write``:
    writes the ranks' part of this step's checkpoint, before the engines wake."""
    run, monitor, source = parts.run, parts.monitor, parts.source
    plan = plan_step(run.config, step, parts.coefficients.kl_coef)
    sampled = source.take(step)
    log_samples(sampled, monitor, step)
    metrics = sampled.metrics | rollout_metrics(sampled.finished)
    with forgetting_misaligned(source, step):
        batch, alignment = None, None
        if sampled.groups:
            batch = batch_of(run, sampled.groups, monitor)
            alignment = run_passes(parts, batch, plan)
            parts.kept.keep(step, batch, parts.coefficients, run)
        metrics |= parts.checks.before_update(
            BeforeUpdate(
                run, monitor, step, plan, sampled.finished, sampled.groups, batch, alignment
            )
        )
        if batch is None:
            renew_reference(parts, step)
        else:
            metrics |= update(parts, batch, plan, alignment, step)
        source.weights_changed(step)
        # Engines that slept have no weights, also where nothing was trained.
        metrics |= sync_weights(parts, step, write)
    metrics |= memory_by_phase(run.actor.take_peaks()) | source.metrics()
    few = None if batch is None else shortest_sequences(batch, run.config)
    return Trained(metrics, sampled.groups, few)


def batch_of(run: Running, groups: Sequence[Group], monitor: Monitor) -> StepBatch:
    """All samples of the groups, at least one, with a teacher's log-probs if there is one: most
    were asked for while other groups were sampled. Raises ComponentError: a sample could not be
    scored."""
    scored = None
    if run.teacher is not None:
        with monitor.phase("teacher"):
            scored = run.teacher.take(groups)
    rewards, version = run.sampling.rewards, run.sampling.pool.weights_version
    return StepBatch.of(run.config.algorithm, groups, rewards, version, scored)


def run_passes(parts: UpdateParts, batch: StepBatch, plan: StepPlan) -> Alignment | None:
    """The forward passes before the update, over sequences that the ranks then have."""
    with parts.monitor.phase("log_probs"):
        return parts.run.actor.run_part(batch.sequences, plan)


def update(
    parts: UpdateParts, batch: StepBatch, plan: StepPlan, alignment: Alignment | None, step: int
) -> dict[str, float]:
    """Advantages and update of a batch that the ranks have. ``alignment``: from :func:`run_passes`.
    Returns the metrics of it, and of the passes."""
    run, monitor, coefficients = parts.run, parts.monitor, parts.coefficients
    actor, config = run.actor, run.config
    plan = complete(plan, alignment, coefficients, monitor, step)
    traced = traced_places(batch.keys, config.runner.token_samples)
    plan = dataclasses.replace(plan, traced=traced)
    with monitor.phase("advantage"):
        advantages = None if plan.values else batch.advantages(config)
    digest_start(monitor, actor)
    with monitor.phase("update"):
        report = actor.finish_step(plan, advantages)
    metrics = coefficients.metrics(plan.objective.entropy_coef)
    metrics |= log_update(config, batch, plan, report, monitor, step)
    coefficients.update_kl(metrics.get("train/kl"), samples=len(batch))
    renew_reference(parts, step)
    changes = digest_weights(monitor, actor)
    metrics |= parts.checks.after_update(
        AfterUpdate(run, monitor, step, plan, batch, report, changes, metrics)
    )
    monitor.count_tokens(int(batch.sequences.sequence_lengths.sum()))
    return batch_metrics(batch.sequences) | mismatch_metrics(alignment) | metrics


@contextlib.contextmanager
def forgetting_misaligned(source: GroupSource, step: int) -> Iterator[None]:
    """A resumed run must not find samples again that failed the gate or an invariant."""
    try:
        yield
    except (AlignmentError, InvariantError):
        source.forget(step)
        raise


def log_samples(sampled: Sampled, monitor: Monitor, step: int) -> None:
    """Write the samples to a file, and warn when there are too few groups."""
    monitor.log_samples(step, sampled.finished, dropped=sampled.dropped, engines=sampled.engines)
    if sampled.shortage:
        monitor.warn(f"step {step}: {sampled.shortage}")


def log_update(
    config: Config,
    batch: StepBatch,
    plan: StepPlan,
    report: StepResult,
    monitor: Monitor,
    step: int,
) -> dict[str, float]:
    """Record the ranks' reports of a step: digests, traces of tokens and warnings.

    Returns:
        ``correction/...``, ``distill/...``, ``value/...``, ``train/...`` and ``routing/...``; and
        the mismatch, unless it was measured before the update.
    """
    digests = monitor.digests
    tokens, values, result = report.tokens, report.values, report.policy
    assert tokens is not None, "a step's batch has no advantages before its update"
    digest_sequences(digests, batch, tokens.fingerprints)
    metrics = correction_metrics(plan.correction, tokens.correction)
    if tokens.distill is not None:
        metrics |= {f"distill/{name}": x for name, x in tokens.distill.metrics().items()}
    if values is not None:
        digest_values(digests, values.minibatches, values.fingerprints)
        metrics |= value_metrics(values)
    if result is None:
        return metrics
    write_traces(config, batch, result.traces, monitor, step)
    digest_gradient(digests, result.minibatches, result.gradients)
    if result.fingerprints is not None:
        add_fingerprints(digests, batch.keys, result.fingerprints)
    for index, reason in result.early_stopped.items():
        monitor.warn(f"step {step}: minibatch {index} was discarded: {reason}")
    for index, text in result.clamped.items():
        monitor.warn(f"step {step}: minibatch {index}: {text}")
    metrics |= update_metrics(result) | result.routing | mismatch_metrics(result.alignment)
    return metrics | off_policy_metrics(result, plan.now)


def renew_reference(parts: UpdateParts, step: int) -> None:
    """Let the reference model go to the policy, if it is due.

    At the end of an update; and in a step that was skipped, as those before changed the policy.
    """
    algorithm = parts.run.config.algorithm
    if share := reference_share(algorithm, step):
        with parts.monitor.phase("update"):
            parts.run.actor.renew_reference(share, algorithm.reference.reset_optimizer)


def sync_weights(parts: StepParts, step: int, write: Callable[[], None] | None) -> dict[str, float]:
    """Write the ranks' part of a checkpoint if one is due, then sync the weights to the engines,
    which wake for them. Returns ``memory/...`` of what actor and engines keep while the other has
    the GPU, and how much of the weights was compared."""
    run, monitor, verification, room = parts.run, parts.monitor, parts.verification, parts.wake_room
    if write is not None:
        with monitor.phase("save"):
            write()
    pool = run.sampling.pool
    with monitor.phase("weight_sync"):
        verified = pool.verified_syncs
        asleep, offloaded = weight_sync.sync_weights(
            run.actor, pool, step, verification, wake_room=room
        )
        compared_all = pool.verified_syncs != verified
        metrics = parts.checks.after_sync(
            AfterSync(run, monitor, step, compared_all, asleep, offloaded, room.used)
        )
    return metrics | {"throughput/compared_weights": verification.compared_share}


def shortest_sequences(batch: StepBatch, config: Config) -> TrainingBatch | None:
    """``runner.check_export_sequences`` of them; ``None``: none is wanted."""
    count = config.runner.check_export_sequences
    shortest = batch.sequences.sequence_lengths.argsort(stable=True)[:count].tolist()
    return batch.sequences.select(shortest) if shortest else None
