"""The training loop: one step after another, evaluated, logged and saved.

What a step does is in :mod:`rlmath.training.step`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checkpoint import Checkpoint, CheckpointStore
from rlmath.checks import attempts
from rlmath.checks.prompt_style import expects_request, with_prompt_style
from rlmath.cluster.watchdog import watch_progress
from rlmath.config.load import to_yaml
from rlmath.config.schema import Config
from rlmath.data import ProblemStream, load_problems, load_tokenizer
from rlmath.data.mixture import stream_of
from rlmath.data.prompt_report import too_few
from rlmath.evaluation.held_out import HeldOut, load_held_out
from rlmath.evaluation.run import evaluate
from rlmath.monitor import Listeners, Monitor, open_monitor, plot_curves, read_metrics, set_aside
from rlmath.monitor.collapse import CollapseDetectors, act
from rlmath.rewards.base import RewardError
from rlmath.rewards.registry import any_graded
from rlmath.rollout.continuous import sampler_of
from rlmath.rollout.journal import FOLDER as JOURNAL_FOLDER
from rlmath.rollout.journal import SampleJournal
from rlmath.rollout.ledger import LEDGER_FILE, Ledger
from rlmath.rollout.progress import sampling_progress
from rlmath.rollout.requests import EngineError
from rlmath.rollout.resumed_groups import check_resumed_groups
from rlmath.rollout.sampler import Sampler
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.algorithm_settings import least_groups
from rlmath.training.checkpointing import HasState, Saver, open_saver, open_store
from rlmath.training.controllers import Coefficients
from rlmath.training.export_rehearsal import rehearse_export
from rlmath.training.grace import grace_of
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.kept_files import FOLDER as KEPT_FOLDER
from rlmath.training.model_card import HF_ADAPTER, write_card
from rlmath.training.plugin_sources import PluginSources
from rlmath.training.resumed_model import check_resumed_model
from rlmath.training.session import (
    Session,
    engines_have_to_read,
    open_training,
    with_model_folder,
)
from rlmath.training.step import Trained, train_step
from rlmath.training.summary import check_export, ending, no_room_to_compare, summarize
from rlmath.training.supervise import Events, supervise
from rlmath.types import Group, Problem, TrainingBatch
from rlmath.utils.ending_signals import signals_wait
from rlmath.utils.run_lock import only_run_in


@dataclass(frozen=True)
class Training:
    """What the loop works with. Made by :func:`open_run`.

    Attributes:
        done: Steps done before this start.
        begins: A run begins: what the folder had of steps is of another one.
    """

    session: Session
    source: GroupSource
    sampler: Sampler
    coefficients: Coefficients
    monitor: Monitor
    saver: Saver
    kept: KeptBatches
    detectors: CollapseDetectors
    held_out: Sequence[HeldOut]
    done: int
    begins: bool


@dataclass(frozen=True)
class Opened:
    """An attempt is ready: its next step is the one after ``training.done``."""

    training: Training


@dataclass(frozen=True)
class StepDone:
    """A step that is done, logged and, where it was due, saved.

    Attributes:
        number: Of the step, from 1.
        metrics: Its line of ``metrics.jsonl``.
        groups: That it trained on: problems with their graded samples.
    """

    number: int
    metrics: Mapping[str, float]
    groups: Sequence[Group]


@dataclass(frozen=True)
class Finished:
    """All steps are done, and the model is exported."""


@dataclass(frozen=True)
class Answer:
    """What was asked between two steps has been done."""

    value: Any


# Something to do with a run between two of its steps.
Ask = Callable[[Training], Any]


def run(config: Config) -> int:
    """Train as the settings say.

    Returns:
        The exit code.
    """
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
    with only_run_in(config.runner.run_dir):
        config = with_prompt_style(with_model_folder(config), "train")
        yield from supervise(config, functools.partial(train, given=config))


def train(config: Config, given: Config | None = None) -> Events:
    """One start of a run, to its end; see :func:`steps`.

    Args:
        config: The settings in force.
        given: As the user gave them, before a restart changed some.
    """
    with (
        curves_if_interrupted(Path(config.runner.run_dir)),
        open_run(config) as training,
        grace_of(config, training.session.actor) as grace,
    ):
        batch: TrainingBatch | None = None
        yield from asked_between(training, Opened(training))
        training.monitor.begin_step()
        if training.done == 0 and training.held_out and config.eval.every:
            metrics = evaluate_held_out(training, 0)
            training.detectors.see(0, metrics)
            training.monitor.log_step(0, metrics)
        attempts.record(config, training.done, training.begins, given)
        for step in range(training.done + 1, config.runner.steps + 1):
            made, line = step_and_save(training, step)
            # Of an earlier one where the last step was skipped.
            batch = made.shortest if made.shortest is not None else batch
            grace.step_done()
            yield from asked_between(training, StepDone(step, line, made.groups))
        with signals_wait("a save"):
            training.saver.finish()
        export(training, batch)
        yield from asked_between(training, Finished())


def asked_between(training: Training, event: Opened | StepDone | Finished | Answer) -> Events:
    """Yield an event, and then an ``Answer`` for each ``Ask`` that is sent in reply."""
    while True:
        with training.monitor.paused():
            ask: Ask | None = yield event
        if ask is None:
            return
        event = Answer(ask(training))


@contextlib.contextmanager
def curves_if_interrupted(run_dir: Path) -> Iterator[None]:
    """Draw the curves of a run that does not come to its end, when it has saved what it can."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ValueError, OSError):  # No step yet, or a full disk.
            path = plot_curves(run_dir)
            print(f"curves of the steps so far: {path}", flush=True)
        raise


def check_resumed(config: Config, stream: ProblemStream[Problem], found: Checkpoint) -> None:
    """What can be said of a checkpoint before ranks and engines are started.

    Raises:
        UserError: The run cannot continue from it.
    """
    sampler = found.driver_state["sampler"]
    if (place := sampler.get("stream")) is not None:
        stream.load_state_dict(place)
    check_resumed_model(config, found.path)
    check_resumed_groups(config, found.path, sampler)


@contextlib.contextmanager
def open_run(config: Config) -> Iterator[Training]:
    """Load the data, start ranks and engines, and restore the last checkpoint."""
    run_dir, data, steps = Path(config.runner.run_dir), config.data, config.runner.steps
    per_step = config.algorithm.prompts_per_step
    tokenizer = load_tokenizer(config.model.path)
    rehearse_export(config.model.path)
    problems, report = load_problems(
        data.train_paths,
        data,
        tokenizer,
        graded=any_graded(item.name for item in config.reward.items),
        needs_box=expects_request(config),
    )
    print("training problems:", report.describe(data.max_prompt_tokens), flush=True)
    few = too_few("problems", len(problems), "algorithm.prompts_per_step", per_step)
    print("\n".join([*report.prompt_lines(), *few]), flush=True)
    held_out = load_held_out(config, tokenizer)
    stream = stream_of(problems, data.train_weights, data.seed, data.shuffle)
    coefficients = Coefficients(config.algorithm)
    store = open_store(config)
    checkpoint = store.resume(
        config.runner.resume, functools.partial(check_resumed, config, stream)
    )
    done = 0 if checkpoint is None else checkpoint.step
    reads = engines_have_to_read(config, resumes=checkpoint is not None)
    after = own_step(store, checkpoint)
    if not after:
        set_aside(run_dir, LEDGER_FILE)
    with (
        open_training(
            config,
            problems=[*problems, *(p for one in held_out for p in one.problems)],
            engines_read=reads,
        ) as session,
        contextlib.ExitStack() as stack,
    ):
        journal = SampleJournal(run_dir / JOURNAL_FOLDER, config.runner.journal_keep_gib)
        stack.callback(journal.close)
        ledger = Ledger(run_dir / LEDGER_FILE, after)
        kept = KeptBatches(run_dir / KEPT_FOLDER, config.runner.replay_keep_gib, after)
        stack.callback(kept.close)
        sampler = sampler_of(
            config,
            stream,
            least_groups(config, session.layout),
            ledger,
            journal,
            (lambda _: None) if session.teacher is None else session.teacher.submit,
        )
        states: dict[str, HasState] = {
            "sampler": sampler,
            "coefficients": coefficients,
            "plugins": PluginSources(config.plugin_hashes),
        }
        saver = stack.enter_context(open_saver(config, store, session, states))
        monitor = stack.enter_context(
            open_monitor(
                run_dir,
                config.runner,
                steps,
                done if checkpoint else None,
                sampling=functools.partial(sampling_progress, session.sampling.pool),
                listeners=Listeners(phase=saver.look),
            )
        )
        monitor.show_settings(to_yaml(config), attempts.flat_settings(config))
        source = GroupSource(session, sampler, monitor)
        stack.callback(source.close)
        if checkpoint is not None:
            saver.restore(checkpoint, session.sampling.pool)
        elif config.actor.lora.init_from is not None or not reads:
            # Engines have read the base model, or nothing.
            session.sampling.pool.sleep()
            sync_weights(session.actor, session.sampling.pool, 0, again=True)
        detectors = CollapseDetectors(config.collapse, read_metrics(run_dir))
        stack.enter_context(saver.saving_when_cut_short())
        probes = [*session.watchdog_probes(monitor), saver.watchdog_probe()]
        stack.enter_context(watch_progress(config.watchdog.stall_s, probes))
        yield Training(
            session,
            source,
            sampler,
            coefficients,
            monitor,
            saver,
            kept,
            detectors,
            held_out,
            done,
            not after,
        )


def own_step(store: CheckpointStore, checkpoint: Checkpoint | None) -> int:
    """The step up to which what the folder has of steps is of this run; 0: none, before a new run
    or one that begins from another run's checkpoint, or from one that was set aside."""
    return checkpoint.step if checkpoint and store.owns(checkpoint.path) else 0


def step_and_save(training: Training, step: int) -> tuple[Trained, Mapping[str, float]]:
    """One step of the loop with its evaluation, its log line and, when it is due, its checkpoint.

    Returns:
        The step, and its line of ``metrics.jsonl``.
    """
    runner, every = training.session.config.runner, training.session.config.eval.every
    last = step == runner.steps
    save_due = last or bool(runner.save_every and step % runner.save_every == 0)
    # The ranks collect what they save on the GPUs that sleeping engines have left to them.
    early = save_due and training.session.sampling.pool.spec.sleeps
    write = functools.partial(training.saver.write, step) if early else None
    trained = train_step(
        training.session,
        training.source,
        training.coefficients,
        training.monitor,
        training.kept,
        step,
        write,
    )
    metrics = trained.metrics
    if training.held_out and every and (last or step % every == 0):
        try:
            metrics |= evaluate_held_out(training, step)
        except (KeyboardInterrupt, SystemExit, EngineError, RewardError):
            # The update is whole, and is saved with what came before it. The last step is done
            # again, so that a run does not end without its last evaluation.
            if not last:
                _done(training, step, metrics)
            raise
    line = _done(training, step, metrics)
    act(training.detectors.see(step, metrics), training.monitor.note, training.monitor.warn)
    if save_due:
        with training.monitor.phase("save"), signals_wait("a save"):
            training.saver.save()
    training.sampler.journal.drop(up_to=training.saver.committed_step)
    return trained, line


def _done(training: Training, step: int, metrics: dict[str, float]) -> Mapping[str, float]:
    """Logged before it is saved: a checkpoint has the metrics of all of its steps."""
    line = training.monitor.log_step(step, metrics)
    training.saver.step_done(step, metrics)
    return line


def evaluate_held_out(training: Training, step: int) -> dict[str, float]:
    """``eval/...`` of the current weights."""
    seed = training.session.config.runner.seed
    return evaluate(training.session.sampling, seed, training.held_out, training.monitor, step)


def export(training: Training, batch: TrainingBatch | None) -> None:
    """Write the trained model, the summary and the model card.

    Args:
        batch: A few sequences for checking the exported model; ``None``: it is not checked.
    """
    config, session = training.session.config, training.session
    run_dir = Path(config.runner.run_dir)
    # Nothing is sampled any more, and a GPU has no room for both.
    session.sampling.pool.sleep()
    session.actor.save_hf(run_dir / "hf", run_dir / HF_ADAPTER if config.actor.lora.rank else None)
    if config.runner.check_export_sequences:
        why = "no step was run" if batch is None else no_room_to_compare(run_dir / "hf")
        if why:
            print(f"export   not compared with transformers: {why}", flush=True)
            batch = None
    checked = check_export(session, run_dir / "hf", batch)
    summary = summarize(config, session, checked)
    write_card(run_dir)
    attempts.note_export(run_dir, max(training.done, config.runner.steps))
    print(ending(config, summary), flush=True)
