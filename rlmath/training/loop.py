"""The training loop: one step after another, evaluated, logged and saved.

A step is in :mod:`rlmath.training.step`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checkpoint.mirror import mirroring
from rlmath.checks import attempts
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.config.schema import Config
from rlmath.engines.requests import EngineError
from rlmath.evaluation.run import evaluate
from rlmath.monitor import plot_curves
from rlmath.monitor.collapse import act
from rlmath.rewards.base import RewardError
from rlmath.training.attempt import Training, open_run
from rlmath.training.grace import grace_of
from rlmath.training.model_card import HF_ADAPTER, write_card
from rlmath.training.opening import with_model_folder
from rlmath.training.profiling import profile_step
from rlmath.training.step import Trained, train_step
from rlmath.training.summary import check_export, ending, no_room_to_compare, summarize
from rlmath.training.supervise import Events, supervise
from rlmath.types import Group, TrainingBatch
from rlmath.utils.ending_signals import signals_wait
from rlmath.utils.run_lock import only_run_in


@dataclass(frozen=True)
class Opened:
    """An attempt is ready: its next step is the one after ``training.done``."""

    training: Training


@dataclass(frozen=True)
class StepDone:
    """A step that is done, logged and, where it was due, saved."""

    number: int  # Number of the step, from 1.
    metrics: Mapping[str, float]  # Its line of metrics.jsonl.
    groups: Sequence[Group]  # Groups that it trained on: problems with their graded samples.


@dataclass(frozen=True)
class Finished:
    """All steps are done, and the model is exported."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request between two steps."""

    value: Any


# Something to do with a run between two of its steps.
Ask = Callable[[Training], Any]


def run(config: Config) -> int:
    """Train as the settings say. Returns the exit code."""
    for _ in steps(config):
        pass
    return 0


def steps(config: Config) -> Events:
    """The steps of a run, each trained when it is asked for. When a part of the run fails, it
    restarts from the last checkpoint, and steps are repeated.

    Yields ``Opened`` for each attempt, ``StepDone`` for each step and ``Finished``. An ``Ask`` that
    is sent at any of them is called with the run, and yields ``Answer``. To close the generator is
    to interrupt the run: it saves what is done.
    """
    runner = config.runner
    with (
        only_run_in(runner.run_dir),
        mirroring(runner.run_dir, runner.mirror, runner.mirror_wait_s),
    ):
        config = with_prompt_style(with_model_folder(config), "train")
        yield from supervise(config, functools.partial(train, given=config))


def train(config: Config, given: Config | None = None) -> Events:
    """One start of a run, to its end; see :func:`steps`. ``config``: the current settings.
    ``given``: as the user gave them, before a restart changed some."""
    with (
        curves_if_interrupted(Path(config.runner.run_dir)),
        open_run(config) as training,
        grace_of(config, training.parts.run.actor) as grace,
    ):
        batch: TrainingBatch | None = None
        yield from answer_between(training, Opened(training))
        training.monitor.begin_step()
        if training.done == 0 and training.held_out and config.eval.every:
            metrics = evaluate_held_out(training, 0)
            training.detectors.update(0, metrics)
            training.monitor.log_step(0, metrics)
        attempts.record(config, training.done, training.begins, given)
        for step in range(training.done + 1, config.runner.steps + 1):
            made, line = step_and_save(training, step)
            # Sequences of an earlier step if the last one was skipped.
            batch = made.shortest if made.shortest is not None else batch
            grace.step_done()
            yield from answer_between(training, StepDone(step, line, made.groups))
        with signals_wait("a save"):
            training.saver.poll(wait=True)
        export(training, batch)
        yield from answer_between(training, Finished())


def answer_between(training: Training, event: Opened | StepDone | Finished | Answer) -> Events:
    """Yield an event, and then an ``Answer`` for each ``Ask`` that is sent in reply."""
    while True:
        with training.monitor.pause():
            ask: Ask | None = yield event
        if ask is None:
            return
        event = Answer(ask(training))


@contextlib.contextmanager
def curves_if_interrupted(run_dir: Path) -> Iterator[None]:
    """Draw the curves of a run that fails, after its last save."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ValueError, OSError):  # No step yet, or a full disk.
            path = plot_curves(run_dir)
            print(f"curves of the steps so far: {path}", flush=True)
        raise


def step_and_save(training: Training, step: int) -> tuple[Trained, Mapping[str, float]]:
    """One step of the loop with its evaluation, its log line and, when it is due, its checkpoint.
    Returns the step, and its line of ``metrics.jsonl``."""
    runner, every = training.config.runner, training.config.eval.every
    last = step == runner.steps
    save_due = last or bool(runner.save_every and step % runner.save_every == 0)
    # The ranks gather their state on GPUs that sleeping engines have freed.
    early = save_due and training.parts.run.sampling.pool.spec.sleeps
    write = functools.partial(training.saver.write, step) if early else None
    with profile_step(training.parts.run, training.monitor, step):
        trained = train_step(training.parts, step, write)
    metrics = trained.metrics
    if training.held_out and every and (last or step % every == 0):
        try:
            metrics |= evaluate_held_out(training, step)
        except (KeyboardInterrupt, SystemExit, EngineError, RewardError):
            # The update is complete, and is saved with what came before it. The last step is done
            # again, so that a run does not end without its last evaluation.
            if not last:
                _finish_step(training, step, metrics)
            raise
    line = _finish_step(training, step, metrics)
    act(training.detectors.update(step, metrics), training.monitor.note, training.monitor.warn)
    if save_due:
        with training.monitor.phase("save"), signals_wait("a save"):
            training.saver.save()
    training.sampler.journal.drop(up_to=training.saver.committed_step)
    return trained, line


def _finish_step(training: Training, step: int, metrics: dict[str, float]) -> Mapping[str, float]:
    """Logged before it is saved: a checkpoint has the metrics of all of its steps."""
    line = training.monitor.log_step(step, metrics)
    training.saver.step_done(step, metrics)
    return line


def evaluate_held_out(training: Training, step: int) -> dict[str, float]:
    """``eval/...`` of the current weights."""
    seed, sampling = training.config.runner.seed, training.parts.run.sampling
    return evaluate(sampling, seed, training.held_out, training.monitor, step)


def export(training: Training, batch: TrainingBatch | None) -> None:
    """Write the trained model, the summary and the model card. ``batch``: a few sequences for
    checking the exported model; ``None``: it is not checked."""
    config, run = training.config, training.parts.run
    run_dir = Path(config.runner.run_dir)
    # Nothing is sampled any more, and a GPU has no room for both.
    run.sampling.pool.sleep()
    run.actor.save_hf(run_dir / "hf", run_dir / HF_ADAPTER if config.actor.lora.rank else None)
    if config.runner.check_export_sequences:
        why = "no step was run" if batch is None else no_room_to_compare(run_dir / "hf")
        if why:
            print(f"export   not compared with transformers: {why}", flush=True)
            batch = None
    checked = check_export(run, run_dir / "hf", batch)
    summary = summarize(config, run.layout, checked)
    write_card(run_dir)
    attempts.note_export(run_dir, max(training.done, config.runner.steps))
    print(ending(config, summary), flush=True)
