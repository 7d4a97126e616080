"""One start of a run: its data, ranks and engines, the driver's parts, and its checkpoint."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint import Checkpoint, CheckpointStore
from rlmath.checks import attempts
from rlmath.cluster.watchdog import WatchedComponent, watch_progress
from rlmath.config.actor import Offload
from rlmath.config.load import to_yaml
from rlmath.config.schema import Config
from rlmath.data import Stream, load_tokenizer
from rlmath.evaluation.held_out import HeldOut, load_held_out
from rlmath.monitor import Listeners, Monitor, open_monitor, read_metrics, set_aside
from rlmath.monitor.collapse import CollapseDetectors
from rlmath.rollout import watchdog_probes as waiting
from rlmath.rollout.group_state import check_resumed_groups
from rlmath.rollout.journal import FOLDER as JOURNAL_FOLDER
from rlmath.rollout.journal import SampleJournal
from rlmath.rollout.ledger import LEDGER_FILE, Ledger
from rlmath.rollout.progress import sampling_progress
from rlmath.rollout.sampler import Sampler
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.algorithm_settings import least_groups
from rlmath.training.checkpointing import HasState, Saver, open_saver, open_store
from rlmath.training.checks.catalog import step_checks
from rlmath.training.controllers import Coefficients
from rlmath.training.engine_settings import engines_have_to_read, verification_of
from rlmath.training.export_rehearsal import rehearse_export
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.kept_files import FOLDER as KEPT_FOLDER
from rlmath.training.opening import Running, open_training
from rlmath.training.plugin_sources import PluginSources
from rlmath.training.problems import open_problems
from rlmath.training.rank_settings import profile_folder
from rlmath.training.resumed_model import check_resumed_model
from rlmath.training.step import StepParts
from rlmath.types import Problem


@dataclass(frozen=True)
class Training:
    """Parts of the training loop. Made by :func:`open_run`."""

    parts: StepParts  # Parts of a step.
    sampler: Sampler
    saver: Saver
    detectors: CollapseDetectors
    held_out: Sequence[HeldOut]
    done: int  # Steps done before this start.
    begins: bool  # A new run, to which earlier steps in the folder do not belong.

    @property
    def config(self) -> Config:
        """The settings, with the model's path resolved."""
        return self.parts.run.config

    @property
    def monitor(self) -> Monitor:
        return self.parts.monitor


def check_resumed(config: Config, stream: Stream, found: Checkpoint) -> None:
    """Check a checkpoint before ranks and engines are started. Raises UserError: the run cannot
    continue from it."""
    sampler = found.driver_state["sampler"]
    if (place := sampler.get("stream")) is not None:
        stream.load_state_dict(place)
    check_resumed_model(config, found.path)
    check_resumed_groups(config, found.path, sampler)


@dataclass(frozen=True)
class _Begin:
    """Data of a run, and where it begins, before anything is started."""

    stream: Stream
    held_out: Sequence[HeldOut]
    problems: Sequence[Problem]
    store: CheckpointStore  # The run's checkpoints.
    checkpoint: Checkpoint | None  # Its start; None: the model's own weights.

    @property
    def own_step(self) -> int:
        """Last step in the folder that belongs to this run; 0: none, as for a new run, or one that
        begins from another run's checkpoint or from one that was set aside."""
        found = self.checkpoint
        return found.step if found and self.store.owns(found.path) else 0


def load_data(config: Config) -> _Begin:
    """Read problems and the last checkpoint. Raises UserError: the data, or the checkpoint with
    these settings, cannot be used."""
    tokenizer = load_tokenizer(config.model.path)
    rehearse_export(config.model.path)
    stream, problems = open_problems(config, tokenizer)
    held_out = load_held_out(config, tokenizer)
    store = open_store(config)
    checkpoint = store.resume(
        config.runner.resume, functools.partial(check_resumed, config, stream)
    )
    sampled = [*problems, *(p for one in held_out for p in one.problems)]
    return _Begin(stream, held_out, sampled, store, checkpoint)


@contextlib.contextmanager
def open_run(config: Config) -> Iterator[Training]:
    """Load the data, start ranks and engines, and restore the last checkpoint."""
    begin = load_data(config)
    reads = engines_have_to_read(config, resumes=begin.checkpoint is not None)
    if not begin.own_step:
        set_aside(Path(config.runner.run_dir), LEDGER_FILE)
        shutil.rmtree(profile_folder(config), ignore_errors=True)
    with (
        open_training(config, problems=begin.problems, engines_read=reads) as run,
        contextlib.ExitStack() as stack,
    ):
        training = connect(run, begin, stack)
        saver, pool = training.saver, run.sampling.pool
        if begin.checkpoint is not None:
            saver.restore(begin.checkpoint, pool)
        elif config.actor.lora.init_from is not None or not reads:
            # Engines have read the base model, or nothing.
            pool.sleep()
            sync_weights(run.actor, pool, 0, again=True)
        stack.enter_context(saver.saving_when_cut_short())
        probes = [*watchdog_probes(run, training.monitor), saver.watchdog_probe()]
        stack.enter_context(watch_progress(config.watchdog.stall_s, probes))
        yield training


def connect(run: Running, begin: _Begin, stack: contextlib.ExitStack) -> Training:
    """Make the driver's parts of a run, which end with the stack."""
    config, after = run.config, begin.own_step
    run_dir = Path(config.runner.run_dir)
    done = 0 if begin.checkpoint is None else begin.checkpoint.step
    journal = SampleJournal(run_dir / JOURNAL_FOLDER, config.runner.journal_keep_gib)
    stack.callback(journal.close)
    ledger = Ledger(run_dir / LEDGER_FILE, after)
    kept = KeptBatches(run_dir / KEPT_FOLDER, config.runner.replay_keep_gib, after)
    stack.callback(kept.close)
    submit = (lambda _: None) if run.teacher is None else run.teacher.submit
    least = least_groups(config, run.layout)
    sampler = Sampler(config, begin.stream, least, ledger, journal, submit)
    coefficients = Coefficients(config.algorithm)
    states: dict[str, HasState] = {
        "sampler": sampler,
        "coefficients": coefficients,
        "plugins": PluginSources(config.plugin_hashes),
    }
    leave_gpus = functools.partial(leave_gpus_to_ranks, run)
    saver = stack.enter_context(open_saver(begin.store, run, states, leave_gpus))
    monitor = stack.enter_context(
        open_monitor(
            run_dir,
            config.runner,
            config.runner.steps,
            None if begin.checkpoint is None else done,
            sampling=functools.partial(sampling_progress, run.sampling.pool),
            listeners=Listeners(phase=saver.poll),
        )
    )
    monitor.show_settings(to_yaml(config), attempts.flat_settings(config))
    source = GroupSource(run, sampler, monitor)
    stack.callback(source.close)
    checks = step_checks()
    stack.callback(checks.close)
    parts = StepParts(
        run,
        monitor,
        coefficients,
        checks,
        source,
        kept,
        verification_of(config, run.layout),
        WakeRoom(),
    )
    detectors = CollapseDetectors(config.collapse, read_metrics(run_dir))
    return Training(parts, sampler, saver, detectors, begin.held_out, done, not after)


def leave_gpus_to_ranks(run: Running) -> None:
    """End engines on the ranks' GPUs if the ranks' weights were moved out for them: both do not
    fit. Nothing can be sampled after it."""
    if run.sampling.pool.spec.sleeps and run.config.actor.offload is Offload.all:
        run.sampling.pool.shutdown()


def watchdog_probes(run: Running, monitor: Monitor) -> list[WatchedComponent]:
    """Events that a run can wait for, for the watchdog."""
    phase = monitor.phase
    probes = [
        WatchedComponent(lambda: phase.changes, lambda: [f"the phase {phase.name}"]),
        run.actor.watchdog_probe(),
        waiting.engines(run.sampling.pool),
        waiting.grades(run.sampling.collector),
    ]
    return probes if run.teacher is None else [*probes, run.teacher.teacher.watchdog_probe()]
