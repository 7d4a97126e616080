"""The driver's side: a folder of atomic checkpoints.

A checkpoint is written as ``step_000012.partial`` and renamed to ``step_000012`` when everything,
the manifest last, is on the disk. The suffix says what a killed process left:

==============  =====================================================  ======================
``.partial``    being written                                          removed
``.replaced``   an older one of the same step, about to be replaced    put back, or removed
                                                                       when the new one is there
``.deleted``    being deleted                                          removed
==============  =====================================================  ======================

One run owns the folder (``rlmath.utils.run_lock``).
"""

from __future__ import annotations

import errno
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlmath.checkpoint.driver_state import read_driver_state, write_driver_state
from rlmath.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpoint,
    read_manifest,
    sync,
    verify,
    write_manifest,
)
from rlmath.checkpoint.space import disk_full, is_disk_full
from rlmath.errors import UserError

log = logging.getLogger(__name__)

STEP_NAME = re.compile(r"step_(\d{6,})")
_ENDINGS = (".partial", ".replaced", ".deleted")
# A folder that cannot be removed yet, and how long a process that is ending may hold its files.
_IN_USE, _OPEN_S = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY), 60.0


@dataclass(frozen=True)
class Skipped:
    path: Path
    reason: str


@dataclass(frozen=True)
class Newest:
    path: Path | None  # None when there is none.
    skipped: list[Skipped]  # Newer incomplete ones, newest first.


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    driver_state: dict[str, Any]  # As given to CheckpointStore.commit, like metrics.
    metrics: Mapping[str, float]
    skipped: tuple[Skipped, ...] = ()  # Newer incomplete ones, and leftovers of a killed process.


class CheckpointStore:
    """Makes, keeps and finds checkpoints in a folder. ``keep``: newest ones that are kept, at least
    1. ``best``: metrics whose best checkpoint is kept as well, and whether ``max`` or ``min`` is
    best."""

    def __init__(
        self, folder: str | Path, keep: int, best: Mapping[str, Literal["max", "min"]] | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}; at least the newest checkpoint has to be kept")
        self.folder = Path(folder)
        self.keep = keep
        self.best = dict(best or {})
        # Found incomplete: these neither count as kept nor get deleted.
        self._broken: set[str] = set()

    # -- making ---------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        partial = self._partial(step)
        if partial.exists():
            _remove(partial)
        partial.mkdir(parents=True)
        return partial

    def commit(
        self, step: int, driver_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path:
        """Make a checkpoint of what :meth:`begin` gave, then delete those that are over ``keep``.

        An older checkpoint of the same step is replaced.

        Args:
            driver_state: Values of dict, list, str, int, float, bool and None.
            metrics: Values by which the best are found; ones that are not finite never are.

        Raises:
            TypeError: ``driver_state`` would not come back as it is.
            DiskFull: The checkpoint was not made; the others are untouched.
        """
        partial, final = self._partial(step), self.path(step)
        try:
            write_driver_state(partial, driver_state)
            write_manifest(partial, step, {k: float(v) for k, v in metrics.items()})
        except OSError as error:
            if is_disk_full(error):
                self.abandon(step)
                raise disk_full(final) from None
            raise
        self._put_in_place(step)
        self._retain()
        return final

    def adopt(self, step: int) -> Path:
        """Make a checkpoint of a complete one that was copied, with its manifest, to what
        :meth:`begin` gave; returns its folder. None is deleted."""
        for path in self._partial(step).rglob("*"):
            sync(path)
        self._put_in_place(step)
        return self.path(step)

    def _put_in_place(self, step: int) -> None:
        partial, final = self._partial(step), self.path(step)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync(self.folder)
        self._broken.discard(final.name)
        if replaced.exists():
            self._delete(replaced)

    def abandon(self, step: int) -> None:
        """Remove the folder of :meth:`begin`, after a failure of the ranks."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    # -- finding --------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint's folder is in the store; one that was set aside no longer is."""
        return checkpoint.resolve().parent == self.folder.resolve()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; complete or not."""
        if not self.folder.is_dir():
            return []
        matches = (STEP_NAME.fullmatch(p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(m.group(1)) for m in matches if m)

    def newest_complete(self) -> Newest:
        """The newest checkpoint whose files are all intact.

        Changes nothing, so others may call it while a run is active.
        """
        skipped: list[Skipped] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                verify(path)
            except BrokenCheckpoint as error:
                log.warning("skipping checkpoint %s: %s", path, error)
                self._broken.add(path.name)
                skipped.append(Skipped(path, str(error)))
                continue
            return Newest(path, skipped)
        return Newest(None, skipped)

    def resume(
        self, how: str, check: Callable[[Checkpoint], None] = lambda _: None
    ) -> Checkpoint | None:
        """Checkpoint that ``runner.resume`` asks for, after cleaning up after a killed process.

        After ``never`` or a path, checkpoints that would be newer than the run's own beginning are
        moved to a folder beside this one, so that a later ``auto`` does not resume from them.

        Args:
            how: ``auto`` (the newest complete one or ``None``), ``never``, or a checkpoint folder.
            check: Raises if the run cannot resume from a checkpoint; nothing is moved then.

        Raises:
            UserError: The folder given is no complete checkpoint, or none of the checkpoints is
                complete.
        """
        if how not in ("auto", "never"):
            return self._resume_from(Path(how), check)
        leftovers = self.clean_leftovers()
        if how == "never":
            self.set_aside(newer_than=-1)
            return None
        newest = self.newest_complete()
        if newest.path is not None:
            found = open_checkpoint(newest.path, verified=True)
            check(found)
            return replace(found, skipped=(*leftovers, *newest.skipped))
        if newest.skipped:
            reasons = "".join(f"\n  - {s.path.name}: {s.reason}" for s in newest.skipped)
            raise UserError(
                f"No checkpoint in {self.folder} is complete:{reasons}\n"
                "Restore one from a copy, or start again with runner.resume=never."
            )
        return None

    def _resume_from(self, path: Path, check: Callable[[Checkpoint], None]) -> Checkpoint:
        checkpoint = open_checkpoint(path)
        check(checkpoint)
        self.clean_leftovers()
        self.set_aside(newer_than=checkpoint.step if self.owns(path) else -1)
        return checkpoint

    # -- clearing up ----------------------------------------------------------------------------

    def clean_leftovers(self) -> list[Skipped]:
        """Clean up after a killed process; returns what was found."""
        found: list[Skipped] = []
        if not self.folder.is_dir():
            return found
        for path in sorted(self.folder.iterdir()):
            if path.suffix not in _ENDINGS or not STEP_NAME.fullmatch(path.stem):
                continue
            final = path.with_suffix("")
            if path.suffix == ".replaced" and not final.exists():
                path.rename(final)
                found.append(Skipped(path, "its replacement was not finished; put back"))
            elif path.suffix == ".partial":
                _remove(path)
                found.append(Skipped(path, "was not finished; removed"))
            else:
                _remove(path)
                found.append(Skipped(path, "was being deleted; removed"))
        for one in found:
            log.info("checkpoint leftover %s: %s", one.path, one.reason)
        return found

    def set_aside(self, newer_than: int) -> Path | None:
        """Move checkpoints of later steps to a folder beside this one, as after a rollback. Returns
        the folder; ``None`` when there was nothing to move."""
        steps = [step for step in self.steps() if step > newer_than]
        if not steps:
            return None
        number = 1
        while (aside := Path(f"{self.folder}_set_aside_{number}")).exists():
            number += 1
        aside.mkdir()
        # Newest first: if stopped in between, the remaining ones are still a run's beginning.
        for step in reversed(steps):
            self.path(step).rename(aside / self.path(step).name)
        log.info("moved checkpoints of steps %s to %s", steps, aside)
        return aside

    def _retain(self) -> None:
        manifests = {}
        for step in self.steps():
            if self.path(step).name in self._broken:
                continue
            try:
                manifests[step] = read_manifest(self.path(step))
            except BrokenCheckpoint as error:
                log.warning("not counting checkpoint %s: %s", self.path(step), error)
        kept = set(sorted(manifests)[-self.keep :])
        for metric, mode in self.best.items():
            values = {
                step: manifest.metrics[metric]
                for step, manifest in manifests.items()
                if math.isfinite(manifest.metrics.get(metric, math.nan))
            }
            if values:
                # Among equals the later one.
                sign = 1.0 if mode == "max" else -1.0
                kept.add(max(values, key=lambda step: (sign * values[step], step)))
        for step in manifests.keys() - kept:
            self._delete(self.path(step))

    def _delete(self, path: Path) -> None:
        """Under another name first: a half-deleted checkpoint must not look like a broken one."""
        doomed = path.with_suffix(".deleted")
        if doomed.exists():
            _remove(doomed)
        path.rename(doomed)
        _remove(doomed)

    def _partial(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.partial"


def _remove(folder: Path) -> None:
    """Remove a folder, or what can be removed of it now. On NFS a file that a process of this node
    has open, such as a rank that is ending, stays in its folder under a hidden name."""
    until_s = time.monotonic() + _OPEN_S
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in _IN_USE:
                raise
            if time.monotonic() > until_s:
                return log.warning("%s is in use and not removed: %s", folder, error)
        time.sleep(_OPEN_S / 60)


def open_checkpoint(path: Path, verified: bool = False) -> Checkpoint:
    """A checkpoint's driver state and metrics. Raises UserError: it does not exist or is
    incomplete."""
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} is no checkpoint (it has no {MANIFEST}); runner.resume takes auto, never or "
            "the folder of a checkpoint, such as <run_dir>/checkpoints/step_000012."
        )
    try:
        manifest = read_manifest(path) if verified else verify(path)
    except BrokenCheckpoint as error:
        raise UserError(
            f"The checkpoint {path} is incomplete: {error}. Restore it from a copy, or let "
            "runner.resume=auto take the newest complete one."
        ) from None
    return Checkpoint(path, manifest.step, read_driver_state(path), manifest.metrics)
