"""One training step: take samples, have a teacher score them, prepare, update, sync, log.

The names of its phases are those of the metrics ``timing/...``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import UpdateResult
from rlmath.algorithms.alignment import Alignment
from rlmath.config.actor import RoutingReplay
from rlmath.monitor import Monitor
from rlmath.rollout import weight_sync
from rlmath.rollout.sampler import Sampled
from rlmath.training.algorithm_settings import reference_share, update_settings
from rlmath.training.checks.base import AfterSync, AfterUpdate, BeforeUpdate, InvariantError
from rlmath.training.controllers import Coefficients
from rlmath.training.digests import (
    add_fingerprints,
    digest_gradient,
    digest_sequences,
    digest_start,
    digest_weights,
)
from rlmath.training.distillation import teacher_log_probs
from rlmath.training.feed import Feed
from rlmath.training.gate import AlignmentError
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.metrics import (
    memory_by_phase,
    off_policy_metrics,
    rollout_metrics,
    update_metrics,
)
from rlmath.training.mismatch import mismatch_metrics
from rlmath.training.plan import plan_step
from rlmath.training.prepare import Prepared, prepare
from rlmath.training.session import Session
from rlmath.training.step_batch import StepBatch
from rlmath.training.token_traces import traced_places, write_traces
from rlmath.training.values import update_values
from rlmath.types import TrainingBatch


def train_step(
    session: Session,
    feed: Feed,
    coefficients: Coefficients,
    monitor: Monitor,
    kept: KeptBatches,
    step: int,
    write: Callable[[], None] | None = None,
) -> tuple[dict[str, float], TrainingBatch | None]:
    """Take the step's groups, update from them, and sync the weights to the engines.

    Args:
        kept: Takes the step's batch.
        write: Writes the ranks' part of this step's checkpoint, before the engines wake.

    Returns:
        The step's metrics except the timings, which the monitor has, and its
        ``runner.check_export_sequences`` shortest sequences; ``None`` when there are none.
    """
    plan = plan_step(session.config, step)
    sampled = feed.take(step)
    metrics = sampled.metrics | rollout_metrics(sampled.finished)
    log_samples(sampled, monitor, step)
    few = None
    with forgetting_misaligned(feed, step):
        now = BeforeUpdate(session, monitor, step, plan, sampled.finished, sampled.groups, None)
        with feed.sampling_ahead(step):
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
        # Engines that slept have no weights, also where nothing was trained.
        metrics |= sync_weights(session, monitor, step, write)
    metrics |= memory_by_phase(session.actor.take_peaks())
    return metrics | feed.metrics(), few


def train_on(
    session: Session,
    batch: StepBatch,
    plan: StepPlan,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
    sampled: BeforeUpdate | None = None,
    once_dealt: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The part of a step that needs no engines: forward passes, advantages, update. A run does it
    once, and ``rlmath replay`` again.

    Args:
        sampled: What checks see before the update; ``None`` in a replay.
        once_dealt: Called before anything is computed, but after the ranks have their sequences.

    Returns:
        The metrics of it.
    """
    prepared = prepare(session, batch, plan, coefficients.kl_coef, monitor, step, once_dealt)
    if sampled is not None:
        now = dataclasses.replace(sampled, alignment=prepared.alignment)
        prepared.metrics.update(session.checks.before_update(now))
    digest_sequences(monitor.digests, batch, prepared.fingerprints)
    digest_start(monitor, session.actor)
    updated, result, alignment = update(session, prepared, plan, coefficients, monitor, step)
    changes = digest_weights(monitor, session.actor)
    updated |= session.checks.after_update(
        AfterUpdate(session, monitor, step, plan, prepared, result, changes, updated, alignment)
    )
    monitor.count_tokens(int(batch.sequences.sequence_lengths.sum()))
    return prepared.metrics | updated


@contextlib.contextmanager
def forgetting_misaligned(feed: Feed, step: int) -> Iterator[None]:
    """A resumed run must not find samples again that failed the gate or an invariant."""
    try:
        yield
    except (AlignmentError, InvariantError):
        feed.forget(step)
        raise


def log_samples(sampled: Sampled, monitor: Monitor, step: int) -> None:
    """Write the samples to a file, and warn when there are too few groups."""
    monitor.log_samples(step, sampled.finished, dropped=sampled.dropped, engines=sampled.engines)
    if sampled.shortage:
        monitor.warn(f"step {step}: {sampled.shortage}")


def update(
    session: Session,
    prepared: Prepared,
    plan: StepPlan,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
) -> tuple[dict[str, float], UpdateResult | None, Alignment | None]:
    """Train the value model and the policy, and update the coefficients and the reference.

    Returns:
        ``value/...`` and ``train/...``; of the policy, if it was updated, what its update reports,
        and how the log-probs of the first minibatch agree, if no pass has said it.
    """
    # Nothing answers to the coefficient while the value model is trained alone.
    entropy_coef = (
        coefficients.entropy_coef_at(prepared.entropy) if plan.policy else coefficients.entropy_coef
    )
    metrics, result, alignment = coefficients.metrics(entropy_coef), None, None
    with monitor.phase("update"):
        if plan.values:
            metrics |= update_values(session, monitor, step)
        if plan.policy:
            kl_coef = coefficients.kl_coef
            found, result, alignment = update_policy(
                session, prepared, kl_coef, entropy_coef, monitor, step
            )
            metrics |= found
        coefficients.see_kl(metrics.get("train/kl"), samples=len(prepared.batch))
    renew_reference(session, monitor, step)
    return metrics, result, alignment


def renew_reference(session: Session, monitor: Monitor, step: int) -> None:
    """Let the reference model go to the policy, if it is due.

    At the end of an update; and in a step that was skipped, as those before changed the policy.
    """
    algorithm = session.config.algorithm
    if share := reference_share(algorithm, step):
        with monitor.phase("update"):
            session.actor.renew_reference(share, algorithm.reference.reset_optimizer)


def update_policy(
    session: Session,
    prepared: Prepared,
    kl_coef: float,
    entropy_coef: float,
    monitor: Monitor,
    step: int,
) -> tuple[dict[str, float], UpdateResult, Alignment | None]:
    """Optimizer steps of the policy.

    Returns:
        ``train/...``, and the mismatch, unless it was measured before the update; and see
        ``ActorGroup.step_update``.
    """
    config = session.config
    settings = update_settings(config, kl_coef, entropy_coef)
    every = config.actor.routing_mismatch_every
    if config.actor.routing_replay is not RoutingReplay.none and every:
        measures = (step - 1) % every == 0
        settings = dataclasses.replace(settings, routing_mismatch=measures)
    runner = config.runner
    count = 0 if step % runner.samples_every else runner.token_samples
    traced = traced_places(prepared.batch.keys, count)
    now = prepared.batch.weights_version
    result, alignment = session.actor.step_update(settings, now, traced)
    write_traces(config, prepared.batch, result.traces, monitor, step)
    metrics = update_metrics(result) | result.routing | mismatch_metrics(alignment)
    metrics |= off_policy_metrics(result, now)
    digest_gradient(monitor.digests, result.minibatches, result.gradients)
    if result.fingerprints is not None:
        keys = monitor.digests.keys["sequences"]
        add_fingerprints(monitor.digests, keys, result.fingerprints)
    for index, reason in result.early_stopped.items():
        monitor.warn(f"step {step}: minibatch {index} was discarded: {reason}")
    for index, text in result.clamped.items():
        monitor.warn(f"step {step}: minibatch {index}: {text}")
    return metrics, result, alignment


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
