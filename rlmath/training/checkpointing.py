"""When a run is saved: as often as the settings say, at its end, and when it is interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ray.exceptions import RayError

from rlmath.actor.group import ActorGroup
from rlmath.checkpoint import Checkpoint, CheckpointStore, naming_full_disk
from rlmath.cluster.watchdog import Stalled, WatchedComponent
from rlmath.config.schema import Config, Device
from rlmath.engines.requests import EngineError
from rlmath.errors import ComponentError, UserError
from rlmath.monitor.collapse import RollBack
from rlmath.rewards.base import RewardError
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.opening import RunningRanks
from rlmath.utils.close_names import did_you_mean
from rlmath.weights.model_folder import PARTIAL


def open_store(config: Config) -> CheckpointStore:
    runner = config.runner
    best: dict[str, Literal["max", "min"]] = {}
    if runner.best_metric is not None:
        best[runner.best_metric] = "min" if runner.best_is_lowest else "max"
    folder = Path(runner.run_dir) / "checkpoints"
    return CheckpointStore(folder, keep=runner.keep_checkpoints, best=best)


class HasState(Protocol):
    """A part of the driver whose state is in checkpoints; of plain JSON values.

    ``snapshot`` is called at the end of every step and keeps that moment's state; what it returns
    is called when a checkpoint is made of it, maybe by another thread.
    """

    def snapshot(self) -> Callable[[], dict[str, Any]]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Point:
    """State at the end of a step that a checkpoint has in addition to the ranks' part."""

    step: int
    parts: Mapping[str, Callable[[], dict[str, Any]]]
    metrics: Mapping[str, float]

    def driver_state(self) -> dict[str, Any]:
        own = {name: encode() for name, encode in self.parts.items()}
        return own | {"weights_version": self.step}


@contextlib.contextmanager
def open_saver(
    store: CheckpointStore,
    run: RunningRanks,
    states: Mapping[str, HasState],
    leave_gpus: Callable[[], None] | None = None,
) -> Iterator[Saver]:
    """A saver for as long as ranks run; see :class:`Saver`."""
    background = run.config.runner.background_checkpoints
    if background is None:
        background = run.layout.device is Device.cuda
    saver = Saver(store, run.actor, states, background, leave_gpus)
    try:
        yield saver
    finally:
        saver.close()


class Saver:
    """Saves and restores actor, driver and engines.

    Args:
        store: Where to.
        states: The driver's own parts.
        in_background: Write while training continues; :meth:`poll` has to be called regularly.
        leave_gpus: Called before a run that is cut short is saved: engines may hold memory that
            the ranks need for it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        actor: ActorGroup,
        states: Mapping[str, HasState],
        in_background: bool = False,
        leave_gpus: Callable[[], None] | None = None,
    ) -> None:
        self._leave_gpus = leave_gpus
        self._store, self._actor, self._states = store, actor, states
        self._in_background = in_background
        self._last: _Point | None = None
        # Where the ranks write, or wrote last.
        self._folder: Path | None = None
        self._saved_step = 0
        # Another run's checkpoint, which the run began from.
        self._began_from: Path | None = None
        self.committed_step = 0  # Step of the run's newest complete checkpoint; 0: there is none.
        # A save was; the ranks may still be writing.
        self._is_interrupted = False
        # The step whose ranks' part is written, or being written, without a checkpoint yet.
        self._written_step: int | None = None
        # Written by the ranks in the background, and then committed by a thread.
        self._writing: _Point | None = None
        self._committing: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def restore(self, checkpoint: Checkpoint, pool: RolloutPool | None) -> None:
        """Bring actor, driver and engines, if there are any, to where a checkpoint was made."""
        if pool is not None:
            pool.sleep()  # The ranks need the room for all of their state; the sync wakes them.
        self._actor.load_checkpoint(checkpoint.path)
        for name, part in self._states.items():
            part.load_state_dict(checkpoint.driver_state[name])
        if pool is not None:
            sync_weights(self._actor, pool, checkpoint.driver_state["weights_version"])
        if self._store.owns(checkpoint.path):
            self._saved_step = self.committed_step = checkpoint.step
        else:
            self._began_from = checkpoint.path
        self.step_done(checkpoint.step, checkpoint.metrics)
        for skipped in checkpoint.skipped:
            print(f"skipped {skipped.path}: {skipped.reason}", flush=True)
        print(f"resumed after step {checkpoint.step} from {checkpoint.path}", flush=True)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished and logged; it is never repeated from here on."""
        parts = {name: part.snapshot() for name, part in self._states.items()}
        self._last = _Point(step, parts, metrics)
        self._actor.changed = False
        self.poll()

    def write(self, step: int) -> None:
        """Let the ranks write what they hold at the end of a step whose metrics are still to come.

        :meth:`save` makes a checkpoint of it once the step is done. If it never is, there is none.
        Raises DiskFull: there was no room; earlier checkpoints are untouched.
        """
        self.poll(wait=True)
        self._folder = self._store.begin(step)
        self._written_step = step
        try:
            self._actor.save_checkpoint(self._folder, in_background=self._in_background)
        except BaseException:
            self._abandon_written()
            raise

    def save(self) -> None:
        """Make a checkpoint of the last step that is done. Raises DiskFull: there was no room;
        earlier checkpoints are untouched."""
        try:
            self._save()
        except (KeyboardInterrupt, SystemExit):
            self._is_interrupted = True
            raise

    def _save(self) -> None:
        point = self._last
        assert point is not None, "no step is done"
        if self._written_step != point.step:
            self.write(point.step)
        try:
            if self._in_background:
                self._writing = point
            else:
                self._commit(point)
        except BaseException:
            self._abandon_written()
            raise
        self._written_step = None
        self._saved_step = point.step
        for metric in self._store.best:
            if metric not in point.metrics:
                print(
                    f"warning: runner.best_metric={metric}: step {point.step} has no such metric, "
                    "so its checkpoint is not compared" + did_you_mean(metric, point.metrics),
                    file=sys.stderr,
                    flush=True,
                )

    def watchdog_probe(self) -> WatchedComponent:
        """For the watchdog: a save, or an export, makes progress as long as its folder grows."""

        def sizes() -> dict[Path, int]:
            exports = self._store.folder.parent.glob(f".*{PARTIAL}*")
            folders = [*exports] if self._folder is None else [self._folder, *exports]
            return {folder: _bytes_in(folder) for folder in folders}

        def waiting_on() -> list[str]:
            return [
                f"files in {folder}, {written / 2**20:.1f} MiB so far"
                for folder, written in sizes().items()
                if written
            ]

        def progress() -> tuple[tuple[Path, int], ...]:
            return tuple(sizes().items())

        return WatchedComponent(progress, waiting_on)

    def close(self) -> None:
        """End the thread after its current work; drop files that became no checkpoint."""
        self._abandon_written()
        self._thread.shutdown(wait=True)

    @contextlib.contextmanager
    def saving_when_cut_short(self) -> Iterator[None]:
        """Save when the block ends early although the ranks are well, if they hold a step that is
        done: a signal, a reward that raises, an engine that fails for good, any error that nobody
        expected.

        They do not from the beginning of an update until the step's end. A second signal ends the
        saving.
        """
        with naming_full_disk(self._store.folder.parent, self._where_it_resumes):
            try:
                yield
            except BaseException as cause:
                if may_save_after(cause):
                    self._save_after(cause)
                raise

    def _save_after(self, cause: BaseException) -> None:
        signal = isinstance(cause, KeyboardInterrupt | SystemExit)
        what = "interrupted" if signal else f"stopped by {type(cause).__name__}"
        if isinstance(cause, GeneratorExit):  # See ``rlmath.training.loop.steps``.
            what = "closed"
        try:
            print(self._save_what_is_done(what), flush=True)
        except Exception as error:
            print(
                f"{what}; saving failed: {error}\n{self._where_it_resumes()}",
                file=sys.stderr,
                flush=True,
            )

    def _save_what_is_done(self, what: str) -> str:
        last = self._last
        if last is None or last.step == 0:
            return f"{what} before the first step finished"
        if self._actor.changed:
            self.poll(wait=True)
            return (
                f"{what} in the update of step {last.step + 1}, where nothing can be saved; "
                + self._where_it_resumes()
            )
        if self._is_interrupted:
            return (
                f"{what} in the save after step {last.step}, which was abandoned; "
                + self._where_it_resumes()
            )
        if self._saved_step != last.step:
            if self._leave_gpus is not None:
                self._leave_gpus()
            self.save()
        self.poll(wait=True)
        return f"{what}; saved after step {last.step}: runner.resume=auto resumes there"

    def _where_it_resumes(self) -> str:
        if self.committed_step:
            return f"runner.resume=auto resumes after step {self.committed_step}"
        if self._began_from is not None:
            return f"runner.resume={self._began_from} starts from there again"
        return "there is no checkpoint yet, so the run starts over"

    def poll(self, wait: bool = False) -> None:
        """Make a checkpoint of the files written in the background, if they are complete. ``wait``:
        until they are one."""
        if self._writing is not None and self._is_written(self._writing.step, wait):
            point, self._writing = self._writing, None
            self._committing = self._thread.submit(self._commit, point)
        if self._committing is not None and (wait or self._committing.done()):
            committing, self._committing = self._committing, None
            committing.result()

    def _is_written(self, step: int, wait: bool) -> bool:
        try:
            return self._actor.checkpoint_written(wait)
        except BaseException as error:
            # Nobody will wait for it again. An interrupted look at it changes nothing.
            if wait or isinstance(error, UserError):
                self._writing = None
                self._store.abandon(step)
                self._is_interrupted |= isinstance(error, KeyboardInterrupt | SystemExit)
            raise

    def _abandon_written(self) -> None:
        step, self._written_step = self._written_step, None
        if step is not None:
            self._store.abandon(step)

    def _commit(self, point: _Point) -> Path:
        path = self._store.commit(point.step, point.driver_state(), point.metrics)
        self.committed_step = point.step
        return path


def may_save_after(cause: BaseException) -> bool:
    """Whether the ranks and their weights are intact after the error that ended a run.

    Not where a rank failed or hangs, nor after a check that found the weights, the samples or the
    disk wrong: a checkpoint of them would take the place of a good one.
    """
    if isinstance(cause, RewardError | EngineError):
        return True
    of_a_part = (UserError, ComponentError, Stalled, RollBack, RayError)
    return not isinstance(cause, of_a_part)


def _bytes_in(folder: Path) -> int:
    """Size of the files in a folder; 0 when it is not there, or no longer."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # It may be renamed while it is looked at, here or by another node.
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(parent, name))
    return total
