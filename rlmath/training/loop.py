"""Reinforcement learning: generate, grade, advantage, update, refit, evaluate, save.

One step, top to bottom, is :func:`train_step`. The names of its phases are those of the metrics
``timing/...``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from rlmath.actor.settings import NOTHING_LEARNT
from rlmath.batching.from_groups import training_batch
from rlmath.checks import attempts
from rlmath.cluster.watchdog import watched
from rlmath.config.load import save
from rlmath.config.schema import Config
from rlmath.data import load_problems, load_tokenizer
from rlmath.data.mixture import stream_of
from rlmath.evaluation.held_out import load_held_out
from rlmath.evaluation.run import evaluate
from rlmath.monitor import Monitor, open_monitor, read_metrics
from rlmath.monitor.collapse import CollapseDetectors, act
from rlmath.rollout.sampler import Sampler
from rlmath.rollout.weight_sync import refit
from rlmath.training.algorithm_settings import (
    advantage_settings,
    least_groups,
    reference_share,
    update_settings,
)
from rlmath.training.checkpointing import HasState, open_saver, open_store
from rlmath.training.controllers import Coefficients
from rlmath.training.invariants import check_identities
from rlmath.training.metrics import batch_metrics, rollout_metrics, update_metrics
from rlmath.training.model_card import write_card
from rlmath.training.prepare import compared, passes_first, with_kl_rewards, with_log_probs
from rlmath.training.session import Session, open_session, with_model_folder
from rlmath.training.summary import check_export, summarize
from rlmath.training.supervise import supervise
from rlmath.training.values import only_values_learn, train_values, with_values
from rlmath.types import TrainingBatch
from rlmath.utils.run_lock import only_run_in


def run(config: Config) -> int:
    """Train as the settings say; again from the last checkpoint when a part of the run fails.

    Returns:
        The exit code.
    """
    with only_run_in(config.runner.run_dir):
        config = with_model_folder(config)
        save(config, Path(config.runner.run_dir) / attempts.CONFIG_FILE)
        return supervise(config, train)


def train(config: Config) -> int:
    """One start of a run, to its end. Returns the exit code."""
    run_dir = Path(config.runner.run_dir)
    tokenizer = load_tokenizer(config.model.path)
    problems, report = load_problems(config.data.train_paths, config.data, tokenizer)
    print("training problems:", report.describe(config.data.max_prompt_tokens), flush=True)
    held_out = load_held_out(config, tokenizer)
    data = config.data
    stream = stream_of(problems, data.train_weights, data.seed, data.shuffle)
    coefficients = Coefficients(config.algorithm)
    store = open_store(config)
    checkpoint = store.resume(config.runner.resume)
    done = 0 if checkpoint is None else checkpoint.step
    attempts.record(config, after_step=done)
    steps = config.runner.steps
    with (
        open_session(
            config,
            optimizer=config.actor.optimizer,
            optimizer_steps=steps * config.algorithm.minibatches_per_step,
            temperature=config.rollout.temperature,
            problems=[*problems, *(p for one in held_out for p in one.problems)],
        ) as session,
        open_monitor(run_dir, config.runner, steps, done if checkpoint else None) as monitor,
        contextlib.ExitStack() as stack,
    ):
        sampler = Sampler(config, stream, least_groups(config, session.layout))
        states: dict[str, HasState] = {"sampler": sampler, "coefficients": coefficients}
        saver = stack.enter_context(open_saver(config, store, session, states))
        monitor.on_phase.append(saver.look)
        if checkpoint is not None:
            saver.restore(checkpoint, session.sampling.pool)
        detectors = CollapseDetectors(config.collapse, read_metrics(run_dir))
        stack.enter_context(saver.saving_when_cut_short())
        parts = [*session.watched_parts(monitor), saver.watched()]
        stack.enter_context(watched(config.watchdog.stall_s, parts))
        monitor.begin_step()
        batch: TrainingBatch | None = None
        if held_out and config.eval.every and done == 0:
            monitor.log_step(
                0, evaluate(session.sampling, config.runner.seed, held_out, monitor, step=0)
            )
        for step in range(done + 1, steps + 1):
            due = step == steps or (
                config.runner.save_every and step % config.runner.save_every == 0
            )
            # The ranks collect what they save on the GPUs that sleeping engines have left to them.
            early = due and session.sampling.pool.spec.sleeps
            write = functools.partial(saver.write, step) if early else None
            metrics, batch = train_step(session, sampler, coefficients, monitor, step, write)
            if held_out and config.eval.every and (step % config.eval.every == 0 or step == steps):
                metrics |= evaluate(session.sampling, config.runner.seed, held_out, monitor, step)
            # Written down before it is saved: a checkpoint has all of its steps' metrics.
            monitor.log_step(step, metrics)
            saver.step_done(step, metrics)
            act(detectors.see(step, metrics), monitor.note, monitor.warn)
            if due:
                with monitor.phase("save"):
                    saver.save()
        saver.finish()
        # Nothing is sampled any more, and a GPU has no room for both.
        session.sampling.pool.sleep()
        session.actor.save_hf(run_dir / "hf")
        checked = check_export(session, run_dir / "hf", batch) if batch is not None else {}
        summarize(config, session, checked)
        write_card(run_dir)
    return 0


def train_step(
    session: Session,
    sampler: Sampler,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
    write: Callable[[], None] | None = None,
) -> tuple[dict[str, float], TrainingBatch | None]:
    """One rollout and the optimizer steps from it.

    Args:
        write: Writes the ranks' part of this step's checkpoint, before the engines wake.

    Returns:
        The step's metrics but the timings, which the monitor has, and its batch; ``None`` when too
        few groups passed the filter.
    """
    config, actor, sampling = session.config, session.actor, session.sampling
    pool, algorithm = sampling.pool, config.algorithm

    sampling.rewards.set_step(step, config.runner.steps)
    with monitor.phase("generate"):
        # Grading begins with the first sample that is finished.
        sampled = sampler.sample(
            step, pool, sampling.collector, while_grading=lambda: monitor.phase("grade")
        )
    pool.sleep()
    metrics = (
        sampled.metrics
        | pool.metrics()
        | rollout_metrics(sampled.finished)
        | sampling.rewards.metrics()
    )
    monitor.log_samples(step, sampled.finished)
    if sampled.shortage:
        monitor.warn(f"step {step}: {sampled.shortage}")
    if not sampled.groups:
        # Engines that slept have no weights.
        sync_weights(session, monitor, step, write)
        return metrics, None
    with monitor.phase("advantage"):
        advantage = advantage_settings(config, sampling.rewards)
        batch = training_batch(
            sampled.groups,
            advantage,
            truncated=algorithm.truncated.value,
            mask_duplicates=algorithm.filter.mask_duplicates,
        )
        metrics |= batch_metrics(batch)
    with monitor.phase("log_probs"):
        prepared = with_log_probs(session, batch, monitor, step)
        batch = with_kl_rewards(prepared, sampled.groups, advantage, coefficients.kl_coef)
        batch = with_values(session, batch, coefficients.kl_coef)
        metrics |= prepared.metrics
        settings = update_settings(
            config, coefficients.kl_coef, coefficients.entropy_coef_at(prepared.entropy)
        )
    with monitor.phase("update"):
        metrics |= train_values(session, batch, step)
        result = NOTHING_LEARNT
        if not only_values_learn(config, step):
            result, first = actor.update(batch, settings, seed=config.runner.seed + step)
            check_identities(config, batch, result, step, monitor)
            if not passes_first(config, step):
                metrics |= compared(session, first.log_probs, first.batch, monitor, step)
        metrics |= update_metrics(result) | coefficients.metrics(settings)
        coefficients.see_kl(metrics.get("train/kl"), samples=len(batch))
        share = reference_share(algorithm, step)
        if share:
            actor.renew_reference(share, algorithm.reference.reset_optimizer)
    sync_weights(session, monitor, step, write)
    monitor.count_tokens(batch.tokens.numel())
    for index, reason in result.early_stopped.items():
        monitor.warn(f"step {step}: minibatch {index} was discarded: {reason}")
    for index, text in result.clamped.items():
        monitor.warn(f"step {step}: minibatch {index}: {text}")
    return metrics, batch


def sync_weights(
    session: Session, monitor: Monitor, step: int, write: Callable[[], None] | None
) -> None:
    """Write what a checkpoint needs of the ranks, if one is due, and send the weights to the
    engines, which wake for them."""
    if write is not None:
        with monitor.phase("save"):
            write()
    with monitor.phase("refit"):
        every = session.config.weights.verify_every
        refit(session.actor, session.sampling.pool, version=step, verify_every=every)
