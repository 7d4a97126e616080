"""One training step: sample, prepare, update, sync, log.

The names of its phases are those of the metrics ``timing/...``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from rlmath.monitor import Monitor
from rlmath.monitor.digests import digest
from rlmath.rollout import weight_sync
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.sampler import Sampled, Sampler
from rlmath.training.algorithm_settings import reference_share, update_settings
from rlmath.training.controllers import Coefficients
from rlmath.training.digests import (
    add_fingerprints,
    digest_gradient,
    digest_sequences,
    digest_start,
    digest_weights,
)
from rlmath.training.gate import AlignmentError
from rlmath.training.independent import check_independence
from rlmath.training.invariants import InvariantError, check_invariants
from rlmath.training.metrics import rollout_metrics, update_metrics
from rlmath.training.mismatch import check_mismatch
from rlmath.training.passes import Passes
from rlmath.training.prepare import Prepared, prepare
from rlmath.training.session import Session
from rlmath.training.unchanged import check_changes
from rlmath.training.values import update_values
from rlmath.training.weight_sums import expected_sums
from rlmath.types import TrainingBatch


def train_step(
    session: Session,
    sampler: Sampler,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
    write: Callable[[], None] | None = None,
) -> tuple[dict[str, float], TrainingBatch | None]:
    """Sample and grade groups, update from them, and sync the weights to the engines.

    Args:
        write: Writes the ranks' part of this step's checkpoint, before the engines wake.

    Returns:
        The step's metrics except the timings, which the monitor has, and its first
        ``runner.check_export_sequences`` sequences; ``None`` when there are none.
    """
    passes = Passes.of(session.config, step)
    sampled = sample(session, sampler, monitor, step)
    log_samples(sampled, session.sampling.pool, monitor, step)
    if not sampled.groups:
        # Engines that slept have no weights.
        synced = sync_weights(session, monitor, step, write)
        return sampled.metrics | synced, None
    with forgetting_misaligned(sampler, step):
        check_independence(session.config, sampled.groups, step, monitor)
        prepared = prepare(session, sampled.groups, passes, coefficients.kl_coef, monitor, step)
        sequences = prepared.sequences
        digest_sequences(monitor.digests, sequences, prepared.fingerprints)
        digest_start(monitor, session.actor)
        updated = update(session, prepared, passes, coefficients, monitor, step)
    changes = digest_weights(monitor, session.actor)
    check_changes(session.config, changes, updated, step, monitor)
    synced = sync_weights(session, monitor, step, write)
    monitor.count_tokens(int(sequences.sequence_lengths.sum()))
    count = min(session.config.runner.check_export_sequences, len(sequences))
    first = sequences.select(range(count)) if count else None
    return sampled.metrics | prepared.metrics | updated | synced, first


@contextlib.contextmanager
def forgetting_misaligned(sampler: Sampler, step: int) -> Iterator[None]:
    """A resumed run must not find samples again that failed the gate or an invariant."""
    try:
        yield
    except (AlignmentError, InvariantError):
        sampler.journal.forget(step)
        raise


def sample(session: Session, sampler: Sampler, monitor: Monitor, step: int) -> Sampled:
    """Sample and grade the groups of a step; the engines sleep when this returns.

    Returns:
        The groups, with the metrics of sampling, engines, rollouts and rewards.
    """
    sampling, pool = session.sampling, session.sampling.pool
    sampling.rewards.set_step(step, session.config.runner.steps)
    with monitor.phase("generate"):
        # Grading starts with the first finished sample.
        sampled = sampler.sample(
            step,
            pool,
            sampling.collector,
            while_grading=lambda: monitor.phase("grade"),
            weights=sampled_from(session, monitor, step),
        )
    pool.sleep()
    more = pool.metrics() | rollout_metrics(sampled.finished) | sampling.rewards.metrics()
    return dataclasses.replace(sampled, metrics=sampled.metrics | more)


def sampled_from(session: Session, monitor: Monitor, step: int) -> str | None:
    """What tells the weights that a step samples from, and how engines compute with them.

    Returns:
        ``None``: it is not known.
    """
    config = session.config
    if step > 1:
        weights = monitor.digest_log.weights_after(step - 1)
    else:
        files = sorted(path for path in Path(config.model.path).glob("*") if path.is_file())
        weights = digest(*(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files))
    if weights is None:
        return None
    vllm = importlib.util.find_spec("vllm")
    installed = 0 if vllm is None or not vllm.origin else Path(vllm.origin).stat().st_mtime_ns
    layout = session.layout
    engine = (config.model, config.precision, layout.engine_tensor_parallel, installed)
    return digest(weights, layout.device.value, repr(engine), repr(config.actor.lora))


def log_samples(sampled: Sampled, pool: RolloutPool, monitor: Monitor, step: int) -> None:
    """Write the samples to a file, and warn when there are too few groups."""
    generation = pool.generation
    engines = None if generation is None else generation.summary()
    monitor.log_samples(step, sampled.finished, dropped=sampled.dropped, engines=engines)
    if sampled.shortage:
        monitor.warn(f"step {step}: {sampled.shortage}")


def update(
    session: Session,
    prepared: Prepared,
    passes: Passes,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
) -> dict[str, float]:
    """Train the value model and the policy, and update the coefficients and the reference.

    Returns:
        ``value/...`` and ``train/...``.
    """
    algorithm = session.config.algorithm
    entropy_coef = coefficients.entropy_coef_at(prepared.entropy)
    metrics = coefficients.metrics(entropy_coef)
    with monitor.phase("update"):
        if passes.values:
            metrics |= update_values(session)
        if passes.policy:
            kl_coef = coefficients.kl_coef
            metrics |= update_policy(
                session, prepared, passes, kl_coef, entropy_coef, monitor, step
            )
        coefficients.see_kl(metrics.get("train/kl"), samples=len(prepared.sequences))
        if share := reference_share(algorithm, step):
            session.actor.renew_reference(share, algorithm.reference.reset_optimizer)
    return metrics


def update_policy(
    session: Session,
    prepared: Prepared,
    passes: Passes,
    kl_coef: float,
    entropy_coef: float,
    monitor: Monitor,
    step: int,
) -> dict[str, float]:
    """Optimizer steps of the policy, checked by their invariants.

    Returns:
        ``train/...``; and the mismatch, unless it was measured before the update.
    """
    config = session.config
    settings = update_settings(config, kl_coef, entropy_coef)
    now = session.sampling.pool.weights_version
    result, alignment = session.actor.step_update(settings, now)
    sums = expected_sums(config, prepared.sequences, config.runner.seed + step)
    check_invariants(config, prepared.any_advantage, result, step, monitor, sums)
    metrics = update_metrics(result)
    digest_gradient(monitor.digests, result.minibatches)
    if result.fingerprints is not None:
        keys = monitor.digests.keys["sequences"]
        add_fingerprints(monitor.digests, keys, result.fingerprints)
    if alignment is not None:
        metrics |= check_mismatch(
            session,
            alignment,
            prepared.sequences,
            monitor,
            step,
            gate=passes.gate,
            updated=True,
        )
    for index, reason in result.early_stopped.items():
        monitor.warn(f"step {step}: minibatch {index} was discarded: {reason}")
    for index, text in result.clamped.items():
        monitor.warn(f"step {step}: minibatch {index}: {text}")
    return metrics


def sync_weights(
    session: Session, monitor: Monitor, step: int, write: Callable[[], None] | None
) -> dict[str, float]:
    """Write the ranks' part of a checkpoint if one is due, then sync the weights to the engines,
    which wake for them.

    Returns:
        ``memory/...`` of what actor and engines keep while the other has the GPU.
    """
    if write is not None:
        with monitor.phase("save"):
            write()
    with monitor.phase("weight_sync"):
        asleep, offloaded = weight_sync.sync_weights(
            session.actor, session.sampling.pool, step, session.verification
        )
    return session.residue.see(offloaded, asleep)
