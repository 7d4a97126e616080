"""Runs faults one after another on one start of ranks and engines.

Each fault gets a run of a few steps: fresh weights, optimizer, gate, detectors and metrics, in a
folder below the drill's. The steps are those of training, ``training.step.train_step``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.algorithms.filters import EVERY_GROUP
from rlmath.commands.drill.fault import Fault, Scene
from rlmath.config.rollout import overlap_of
from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.errors import ComponentError, UserError
from rlmath.monitor import Listeners, open_monitor
from rlmath.monitor.collapse import CollapseDetectors, act
from rlmath.rollout.sampler import Sampler
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.algorithm_settings import least_groups
from rlmath.training.checks.catalog import step_checks
from rlmath.training.controllers import Coefficients
from rlmath.training.engine_settings import verification_of
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.kept_files import FOLDER as KEPT_FOLDER
from rlmath.training.opening import open_training
from rlmath.training.problems import open_problems
from rlmath.training.step import StepParts, train_step

HEALTHY_STEPS = 4
CONTROL = "healthy"
# Warnings of these detectors say nothing about a tiny model, half of whose answers are right.
_EXPECTED = re.compile(r"^step \d+: (truncated|truncated_groups|equal_rewards|repetition|entropy_)")


@dataclass(frozen=True)
class Outcome:
    name: str
    what: str
    where: str
    alarm: str
    fired: bool  # Whether the expected alarm fired, and none in the healthy run.
    # From the first step with the fault to the alarm, that step included; 0: before it began. None:
    # no alarm.
    steps: int | None
    latest: int  # Steps that were allowed.
    kind: str  # Class of the error; warning, or empty.
    message: str
    skipped: bool  # The configuration cannot have this fault; message says why.
    seconds: float


def run_drill(
    config: Config, faults: Sequence[Fault], folder: Path, say: Callable[[Outcome], None]
) -> list[Outcome]:
    """Plant each fault, after a healthy run."""
    found: list[Outcome] = []
    with open_training(config) as started:
        drill = Drill(Scene(config, started, folder))
        for fault in (None, *faults):
            found.append(drill.healthy() if fault is None else drill.plant(fault))
            say(found[-1])
    return found


class Drill:
    """Ranks and engines that faults are planted in."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._start = scene.folder / "start"
        self._start.mkdir(parents=True, exist_ok=True)
        scene.run.actor.save_checkpoint(self._start)

    def healthy(self) -> Outcome:
        """A run with nothing planted, in which nothing may fire."""
        began_s = time.monotonic()
        kind, message, step = self._steps(None, HEALTHY_STEPS, lambda text: True)
        steps, seconds = step if kind else None, time.monotonic() - began_s
        names = (CONTROL, "nothing", "", "none")
        return Outcome(*names, not kind, steps, HEALTHY_STEPS, kind, message, False, seconds)

    def plant(self, fault: Fault) -> Outcome:
        began_s = time.monotonic()
        why = fault.missing(self._scene.config)
        latest = fault.latest + (steps_ahead(self._scene.config) if fault.latest else 0)
        kind, message, step = "", why or "", 0
        if why is None:
            last = fault.from_step + latest - 1
            kind, message, step = self._steps(
                fault, last, lambda text: re.search(fault.says, text) is not None
            )
        right = bool(kind) and re.search(fault.says, message) is not None
        steps = 0 if step == 0 else step - fault.from_step + 1
        return Outcome(
            fault.name,
            fault.what,
            fault.where,
            fault.alarm,
            fired=right and 0 <= steps <= latest,
            steps=steps if kind else None,
            latest=latest,
            kind=kind,
            message=message or f"no alarm within {latest} steps",
            skipped=why is not None,
            seconds=time.monotonic() - began_s,
        )

    def _steps(
        self, fault: Fault | None, last: int, is_alarm: Callable[[str], bool]
    ) -> tuple[str, str, int]:
        """Train until an alarm, or to the last step. Returns class of the alarm's error (or
        ``warning``), its message and step; empty without one."""
        name = CONTROL if fault is None else fault.name
        folder = self._scene.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with (
            (folder / "output.log").open("w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            return self._logged_steps(fault, folder, last, is_alarm)

    def _logged_steps(
        self, fault: Fault | None, folder: Path, last: int, is_alarm: Callable[[str], bool]
    ) -> tuple[str, str, int]:
        scene, step = self._scene, 0
        with contextlib.ExitStack() as planted:
            warnings: list[str] = []
            try:
                if fault is not None and fault.latest == 0:
                    planted.enter_context(fault.plant(scene))
                with self._run(folder, Listeners(warning=warnings.append)) as run:
                    for step in range(1, last + 1):
                        if fault is not None and step == fault.from_step:
                            planted.enter_context(fault.plant(scene))
                        run.step(step)
                        alarms = [text for text in warnings if is_alarm(text)]
                        alarms = [text for text in alarms if not _EXPECTED.match(text)]
                        if alarms:
                            return "warning", alarms[0], step
            except (UserError, ComponentError) as error:
                kind, message = type(error).__name__, str(error)
                del error
                gc.collect()  # Free what a failed step still holds, such as its requests.
                return kind, message, step
        return "", "", 0

    @contextlib.contextmanager
    def _run(self, folder: Path, listeners: Listeners) -> Iterator[_Run]:
        """A run that begins: all that an earlier one has changed is as at the start."""
        config, started = self._scene.config, self._scene.run
        stream, _ = open_problems(config, load_tokenizer(config.model.path))
        self._reset()
        runner = dataclasses.replace(config.runner, run_dir=str(folder))
        with open_monitor(folder, runner, config.runner.steps, listeners=listeners) as monitor:
            sampler = Sampler(config, stream, least_groups(config, started.layout))
            detectors = CollapseDetectors(config.collapse)
            parts = StepParts(
                started,
                monitor,
                Coefficients(config.algorithm),
                step_checks(),
                GroupSource(started, sampler, monitor),
                KeptBatches(folder / KEPT_FOLDER, 0.0),
                verification_of(started.config, started.layout),
                WakeRoom(),
            )
            ends = (parts.source, parts.kept, parts.checks)
            with contextlib.ExitStack() as stack:
                for one in ends:
                    stack.callback(one.close)
                yield _Run(parts, detectors)

    def _reset(self) -> None:
        actor, sampling = self._scene.run.actor, self._scene.run.sampling
        pool = sampling.pool
        actor.load_checkpoint(self._start)
        sampling.rewards.metrics()
        pool.weights_version = pool.verified_syncs = 0
        pool.sleep()
        sync_weights(actor, pool, 0, again=True)


def steps_ahead(config: Config) -> int:
    """Steps whose samples may all be of a step before: what a schedule has sampled ahead, and the
    groups that were too many for their step."""
    chosen = config.algorithm.filter
    too_many = 0 if chosen.keep == EVERY_GROUP else math.ceil(chosen.oversample) - 1
    return overlap_of(config.rollout).max_lag + too_many


@dataclass(frozen=True)
class _Run:
    parts: StepParts
    detectors: CollapseDetectors

    def step(self, step: int) -> None:
        monitor = self.parts.monitor
        metrics = train_step(self.parts, step).metrics
        monitor.log_step(step, metrics)
        self.parts.run.actor.changed = False
        act(self.detectors.update(step, metrics), monitor.note, monitor.warn)
