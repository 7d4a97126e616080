"""The batches that a run has kept, and the steps that can be replayed. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlmath.checkpoint import BrokenCheckpoint, CheckpointStore
from rlmath.checkpoint.manifest import verify
from rlmath.errors import UserError
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.run_settings import flat
from rlmath.training.kept_files import FOLDER, kept_file, kept_files
from rlmath.utils.array_file import BrokenFile, read_header
from rlmath.utils.ranges import ranges

T = TypeVar("T")

CHECKPOINTS = "checkpoints"
KEEP = "runner.replay_keep_gib"


@dataclass(frozen=True)
class Start:
    """Where a replay begins: after ``step``, from a checkpoint or, at 0, the model's folder."""

    step: int
    path: Path | None

    def __str__(self) -> str:
        return "the initial weights" if self.path is None else f"the checkpoint {self.path.name}"


@dataclass(frozen=True)
class Source:
    """Everything needed to redo a step."""

    run: RunFolder
    start: Start
    # Steps to redo, ascending, without those that trained nothing; the last is the step in
    # question.
    steps: tuple[int, ...]
    headers: Mapping[int, Mapping[str, Any]]
    broken: tuple[str, ...] = ()  # Nearer checkpoints that are unusable, with the reason.

    @property
    def step(self) -> int:
        return self.steps[-1]

    def batch(self, step: int, read: Callable[[Path], T]) -> T:
        """The kept batch of a step. Raises UserError: it cannot be read."""
        return read_batch(read, kept_file(self.run.folder / FOLDER, step), step)


def read_source(run_dir: Path, step: int, begin: int | None = None) -> Source:
    """Find the batches and the start of a replay. ``begin``: step to begin after; ``None``: the
    nearest checkpoint. Raises UserError: the run, the step, a batch or a place to begin is not
    there."""
    run = RunFolder(run_dir)
    recorded = run.digests
    run.settings_of(step)
    _check_step(run_dir, step, recorded)
    starts = {start.step: start for start in _starts(run)}
    if begin is not None and begin not in starts:
        raise UserError(
            f"--from {begin}: {run_dir} has {_of_starts(starts)}; a replay begins there, or at the "
            "nearest one without --from"
        )
    kept = kept_files(run_dir / FOLDER)
    asked = [begin] if begin is not None else sorted(starts, reverse=True)
    broken: list[str] = []
    for first in asked:
        needed = _needed_steps(first, step, recorded)
        if first >= step or any(one not in kept for one in needed):
            continue
        start = starts[first]
        if start.path is not None:
            try:
                verify(start.path)
            except BrokenCheckpoint as error:
                broken.append(f"{start.path}: {error}")
                continue
        headers = {one: read_batch(read_header, kept[one], one) for one in needed}
        return Source(run, start, tuple(needed), headers, tuple(broken))
    raise UserError(_impossible(run_dir, step, recorded, starts, kept, begin, broken))


def _check_step(run_dir: Path, step: int, recorded: Mapping[int, Mapping[str, Any]]) -> None:
    done = sorted(one for one, line in recorded.items() if "tokens" in line or "weights" in line)
    if step not in done:
        has = f"steps {done[0]} to {done[-1]} are" if done else "no step is"
        begun = kept_file(run_dir / FOLDER, step).is_file()
        why = "it was begun and not finished" if begun else "there is none"
        raise UserError(f"step {step}: {why}; in {run_dir}, {has} done")
    if not is_trained(recorded[step]):
        raise UserError(
            f"step {step} trained nothing: too few groups passed the filter (see warnings.jsonl), "
            "so there is no update to redo"
        )


def is_trained(line: Mapping[str, Any]) -> bool:
    """Whether a step made an update, by its digests."""
    return "weights" in line


def _needed_steps(first: int, step: int, recorded: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Steps whose batches a replay reads; one without digests may have trained."""
    between = range(first + 1, step + 1)
    return [one for one in between if one not in recorded or is_trained(recorded[one])]


def _starts(run: RunFolder) -> Iterator[Start]:
    store = CheckpointStore(run.folder / CHECKPOINTS, keep=1)
    for step in store.steps():
        yield Start(step, store.path(step))
    first = run.attempts[0]
    if first.after_step == 0:
        yield Start(0, None)
        return
    # A run that began from another run's checkpoint.
    path = Path(str(flat(first.settings).get("runner.resume")))
    if path.is_dir() and not store.path(first.after_step).is_dir():
        yield Start(first.after_step, path)


def read_batch(read: Callable[[Path], T], path: Path, step: int) -> T:
    """Read a batch, or its header. Raises UserError: it cannot be read."""
    try:
        return read(path)
    except (BrokenFile, OSError) as error:
        raise UserError(f"the batch of step {step} cannot be read: {error}") from error


def _impossible(
    run_dir: Path,
    step: int,
    recorded: Mapping[int, Mapping[str, Any]],
    starts: Mapping[int, Start],
    kept: Mapping[int, Path],
    begin: int | None,
    broken: Sequence[str],
) -> str:
    earlier = [one for one in starts if one < step] if begin is None else [begin]
    damaged = "".join(f"; {one}" for one in broken)
    if begin is not None and begin >= step:
        return f"--from {begin}: step {step} is not after it"
    if not earlier:
        return (
            f"step {step}: {run_dir} has {_of_starts(starts)}, and none before the step to begin at"
            f" (runner.save_every, runner.keep_checkpoints){_possible(recorded, starts, kept)}"
        )
    gone = [one for one in _needed_steps(max(earlier), step, recorded) if one not in kept]
    if not gone:
        return f"step {step}: no checkpoint before it can be read{damaged}"
    which = f"step {gone[0]}" if len(gone) == 1 else f"{len(gone)} steps, {gone[0]} to {gone[-1]},"
    nothing = "" if kept else f"; {run_dir / FOLDER} has no batches at all"
    return (
        f"step {step} would be redone after {starts[max(earlier)]}, and the batch of {which} is "
        f"not kept ({KEEP}: the oldest are removed at the limit){nothing}"
        f"{_possible(recorded, starts, kept)}{damaged}"
    )


def _possible(
    recorded: Mapping[int, Mapping[str, Any]], starts: Mapping[int, Start], kept: Mapping[int, Path]
) -> str:
    found = [
        step
        for step, line in sorted(recorded.items())
        if is_trained(line)
        and any(
            first < step and all(one in kept for one in _needed_steps(first, step, recorded))
            for first in starts
        )
    ]
    if not found:
        return "; no step of this run can be replayed"
    return f"; steps that can be replayed: {ranges(found)}"


def _of_starts(starts: Mapping[int, Start]) -> str:
    names = [
        "the initial weights (0)" if one.path is None else f"a checkpoint of step {step}"
        for step, one in sorted(starts.items())
    ]
    return ", ".join(names) or "no checkpoint"
