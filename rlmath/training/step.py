"""One training step: take samples, have a teacher score them, update, sync, log.

The names of its phases are those of the metrics ``timing/...``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import StepResult
from rlmath.config.schema import Config
from rlmath.monitor import Monitor
from rlmath.rollout import weight_sync
from rlmath.rollout.sampler import Sampled
from rlmath.training.algorithm_settings import reference_share
from rlmath.training.checks.base import AfterSync, AfterUpdate, BeforeUpdate, InvariantError
from rlmath.training.controllers import Coefficients
from rlmath.training.digests import (
    add_fingerprints,
    digest_gradient,
    digest_sequences,
    digest_start,
    digest_values,
    digest_weights,
)
from rlmath.training.distillation import teacher_log_probs
from rlmath.training.gate import AlignmentError
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.metrics import (
    batch_metrics,
    memory_by_phase,
    off_policy_metrics,
    rollout_metrics,
    update_metrics,
)
from rlmath.training.mismatch import correction_metrics, mismatch_metrics
from rlmath.training.plan import complete, plan_step
from rlmath.training.session import Session
from rlmath.training.step_batch import StepBatch
from rlmath.training.token_traces import traced_places, write_traces
from rlmath.training.values import value_metrics
from rlmath.types import Group, TrainingBatch


@dataclass(frozen=True)
class Trained:
    """A step that was trained.

    Attributes:
        metrics: Its metrics except the timings, which the monitor has.
        groups: That it trained on.
        shortest: Its ``runner.check_export_sequences`` shortest sequences; ``None`` when there are
            none.
    """

    metrics: dict[str, float]
    groups: Sequence[Group]
    shortest: TrainingBatch | None


def train_step(
    session: Session,
    source: GroupSource,
    coefficients: Coefficients,
    monitor: Monitor,
    kept: KeptBatches,
    step: int,
    write: Callable[[], None] | None = None,
) -> Trained:
    """Take the step's groups, update from them, and sync the weights to the engines.

    Args:
        kept: Takes the step's batch.
        write: Writes the ranks' part of this step's checkpoint, before the engines wake.

    """
    plan = plan_step(session.config, step, coefficients.kl_coef)
    sampled = source.take(step)
    metrics = sampled.metrics | rollout_metrics(sampled.finished)
    log_samples(sampled, monitor, step)
    few = None
    with forgetting_misaligned(source, step):
        now = BeforeUpdate(session, monitor, step, plan, sampled.finished, sampled.groups, None)
        if sampled.groups:
            scored = teacher_log_probs(session, sampled.groups, monitor)
            batch = StepBatch.of(session, sampled.groups, scored)
            now = dataclasses.replace(now, batch=batch)
            keep = functools.partial(kept.keep, step, batch, coefficients, session)
            metrics |= train_on(session, batch, plan, coefficients, monitor, step, now, keep)
            count = session.config.runner.check_export_sequences
            shortest = batch.sequences.sequence_lengths.argsort(stable=True)[:count].tolist()
            few = batch.sequences.select(shortest) if shortest else None
        else:
            metrics |= session.checks.before_update(now)
            renew_reference(session, monitor, step)
        source.weights_changed(step)
        # Engines that slept have no weights, also where nothing was trained.
        metrics |= sync_weights(session, monitor, step, write)
    metrics |= memory_by_phase(session.actor.take_peaks())
    return Trained(metrics | source.metrics(), sampled.groups, few)


def train_on(
    session: Session,
    batch: StepBatch,
    plan: StepPlan,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
    sampled: BeforeUpdate | None = None,
    keep: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The part of a step that needs no engines: forward passes, advantages, update. A run does it
    once, and ``rlmath replay`` again.

    Args:
        sampled: What checks see before the update; ``None`` in a replay.
        keep: Called once the ranks have the batch.

    Returns:
        The metrics of it.
    """
    actor, config = session.actor, session.config
    with monitor.phase("log_probs"):
        alignment = actor.run_part(batch.sequences, plan)
    keep()
    metrics = batch_metrics(batch.sequences) | mismatch_metrics(alignment)
    if sampled is not None:
        now = dataclasses.replace(sampled, alignment=alignment)
        metrics |= session.checks.before_update(now)
    plan = complete(plan, alignment, coefficients, monitor, step)
    count = 0 if step % config.runner.samples_every else config.runner.token_samples
    plan = dataclasses.replace(plan, traced=traced_places(batch.keys, count))
    with monitor.phase("advantage"):
        advantages = None if plan.values else batch.advantages(config)
    digest_start(monitor, actor)
    with monitor.phase("update"):
        report = actor.finish_step(plan, advantages)
    updated = coefficients.metrics(plan.objective.entropy_coef)
    updated |= log_update(config, batch, plan, report, monitor, step)
    coefficients.see_kl(updated.get("train/kl"), samples=len(batch))
    renew_reference(session, monitor, step)
    changes = digest_weights(monitor, actor)
    updated |= session.checks.after_update(
        AfterUpdate(session, monitor, step, plan, batch, report, changes, updated)
    )
    monitor.count_tokens(int(batch.sequences.sequence_lengths.sum()))
    return metrics | updated


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
    """Write down what the ranks report of a step: digests, traces of tokens and warnings.

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


def renew_reference(session: Session, monitor: Monitor, step: int) -> None:
    """Let the reference model go to the policy, if it is due.

    At the end of an update; and in a step that was skipped, as those before changed the policy.
    """
    algorithm = session.config.algorithm
    if share := reference_share(algorithm, step):
        with monitor.phase("update"):
            session.actor.renew_reference(share, algorithm.reference.reset_optimizer)


def sync_weights(
    session: Session, monitor: Monitor, step: int, write: Callable[[], None] | None
) -> dict[str, float]:
    """Write the ranks' part of a checkpoint if one is due, then sync the weights to the engines,
    which wake for them.

    Returns:
        ``memory/...`` of what actor and engines keep while the other has the GPU, and how much of
        the weights was compared.
    """
    if write is not None:
        with monitor.phase("save"):
            write()
    pool = session.sampling.pool
    with monitor.phase("weight_sync"):
        verified = pool.verified_syncs
        asleep, offloaded = weight_sync.sync_weights(
            session.actor, pool, step, session.verification, wake_room=session.wake_room
        )
        now = AfterSync(
            session,
            monitor,
            step,
            pool.verified_syncs != verified,
            asleep,
            offloaded,
            session.wake_room.used,
        )
        metrics = session.checks.after_sync(now)
    return metrics | {"throughput/compared_weights": session.verification.compared_share}
