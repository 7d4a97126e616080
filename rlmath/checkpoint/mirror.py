"""Mirrors a run's folder to a remote one while the run trains.

A thread looks for new checkpoints. For each it uploads the run's other files, the checkpoint's,
and its manifest last; then it deletes the remote checkpoints that the run's folder no longer has.
The run continues whatever the remote folder does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.manifest import MANIFEST, BrokenCheckpoint, verify
from rlmath.checkpoint.remote import RemoteFolder
from rlmath.checkpoint.remote_owner import Claim, NotOurs, claim, copies_of, is_manifest
from rlmath.checkpoint.run_files import OWN_FOLDER, RunFiles
from rlmath.checkpoint.store import STEP_NAME
from rlmath.checkpoint.transfer import FOLDERS, checkpoints_in, delete_checkpoint, upload_checkpoint
from rlmath.errors import UserError, printable

_MOST_PAUSE_S = 600.0
# At the end of a run: failures in a row, without one file that was uploaded.
_LAST_TRIES = 5


@dataclass(frozen=True)
class Pace:
    """How long a mirror waits, in seconds."""

    poll_s: float = 2.0
    pause_s: float = 5.0  # After a failure; twice as long after each further one.
    last_pause_s: float = 10.0  # Longest pause after a failure at the end of the run.


class MirrorIncomplete(UserError):
    """The run ended well, and its remote folder lacks something."""

    exit_code = 3


@contextlib.contextmanager
def mirroring(
    run_dir: str | Path, url: str | None, wait_s: float, pace: Pace = Pace()
) -> Iterator[None]:
    """Mirror a run's folder for as long as the block runs, and then for up to ``wait_s`` seconds
    until all is uploaded.

    Raises:
        NotOurs: The remote folder is another run's.
        RemoteError: It cannot be used.
        MirrorIncomplete: The block ended, and not all could be uploaded.
    """
    if url is None:
        yield
        return
    folder = Path(run_dir)
    mirror = Mirror(folder, claim(RemoteFolder(url), folder), pace)
    try:
        yield
    except BaseException:
        if problem := mirror.close(wait_s):
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        raise
    if problem := mirror.close(wait_s):
        raise MirrorIncomplete(problem)


# A checkpoint's folder, relative to the run's, and an id that is unique among one step's.
_Checkpoints = dict[str, tuple[int, int]]


class Mirror:
    """The thread that uploads; see :func:`mirroring`."""

    def __init__(self, run_dir: Path, claim: Claim, pace: Pace) -> None:
        self._run_dir, self._claim, self._remote = run_dir, claim, claim.remote
        self._pace = pace
        self._files: RunFiles | None = None
        # Checkpoints that are in the remote folder: their manifests, and ``None`` for torn ones.
        self._there: dict[str, bytes | None] = {}
        self._uploaded: _Checkpoints = {}
        self._broken: _Checkpoints = {}
        # The checkpoint of which some files are uploaded, and these.
        self._partly: tuple[tuple[int, int] | None, set[str]] = (None, set())
        self._problem = "nothing was uploaded yet"
        self._fails = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def close(self, wait_s: float) -> str:
        """Upload the remaining files, and end. Returns the files that the remote folder lacks, and
        why; empty: none."""
        self._ending.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            print(
                f"mirror   uploading to {self._remote.url}, at most {wait_s:g} s; a signal ends it",
                flush=True,
            )
        until_s = time.monotonic() + wait_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            self._thread.join(0.5)  # Signals are handled in between.
        if self._thread.is_alive():
            late = f"not all was uploaded in runner.mirror_wait_s={wait_s:g}"
            self._problem = f"{late}: {self._problem}" if self._problem else late
        if not self._problem:
            return ""
        return printable(
            f"runner.mirror={self._remote.url} is incomplete: {self._problem}. {self._run_dir} has "
            "everything; the same command uploads the rest"
        )

    def _work(self) -> None:
        failures = 0
        while True:
            final, num_put = self._ending.is_set(), self._remote.num_put
            try:
                self._sync(final)
            except NotOurs as error:
                self._warn(str(error))
                self._problem = str(error)
                return
            except Exception as error:  # Whatever it is, the run continues.
                failures = 1 if self._remote.num_put > num_put else failures + 1
                self._problem = str(error) or repr(error)
                if not self._fails:
                    self._warn(f"{self._problem}; training continues, and it is tried again")
                    self._fails = True
                pause_s = min(self._pace.pause_s * 2 ** min(failures - 1, 10), _MOST_PAUSE_S)
                if not final:
                    self._ending.wait(pause_s)
                    failures = 0 if self._ending.is_set() else failures
                elif failures >= _LAST_TRIES:
                    return
                else:
                    time.sleep(min(pause_s, self._pace.last_pause_s))
                continue
            if self._fails:
                print(f"mirror   uploads to {self._remote.url} again", flush=True)
            self._fails, self._problem, failures = False, "", 0
            if final:
                return
            self._ending.wait(self._pace.poll_s)

    def _warn(self, message: str) -> None:
        print(f"warning: runner.mirror: {printable(message)}", file=sys.stderr, flush=True)

    # -- one pass -------------------------------------------------------------------------------

    def _sync(self, final: bool) -> None:
        """Upload all checkpoints that are new, and before each the run's files."""
        files = self._learn() if self._files is None else self._files
        while True:
            local = self._local()
            self._retract(local)
            self._retain(local)
            name = next((n for n in local if not self._is_done(n, local[n])), None)
            if name is None:
                break
            self._problem = f"{name} is not uploaded"
            # The metrics of its steps come first: a resume needs both.
            self._claim.check()
            files.upload()
            self._upload(name, local[name])
        if final:
            self._claim.check()
            files.upload()

    def _learn(self) -> RunFiles:
        """Read the records of earlier starts' uploads."""
        shutil.rmtree(self._run_dir / OWN_FOLDER / "checkpoint", ignore_errors=True)
        local = self._local()
        for folder in FOLDERS:
            for step, sizes in checkpoints_in(self._remote, folder).items():
                name = f"{folder}/step_{step:06d}"
                data = self._remote.read(f"{name}/{MANIFEST}") if MANIFEST in sizes else None
                self._there[name] = data
                if data and name in local and is_manifest(self._run_dir / name, data):
                    self._uploaded[name] = local[name]
        self._files = RunFiles(self._run_dir, self._claim, self._remote.sizes())
        return self._files

    def _local(self) -> _Checkpoints:
        """The run's checkpoints, the latest first."""
        found = {}
        for folder in FOLDERS:
            for path in (self._run_dir / folder).glob(f"step_*/{MANIFEST}"):
                # It may be deleted meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    if STEP_NAME.fullmatch(path.parent.name):
                        found[f"{folder}/{path.parent.name}"] = (stat.st_mtime_ns, stat.st_ino)
        return dict(sorted(found.items(), key=lambda one: one[1], reverse=True))

    def _is_done(self, name: str, identity: tuple[int, int]) -> bool:
        return identity in (self._uploaded.get(name), self._broken.get(name))

    def _upload(self, name: str, identity: tuple[int, int]) -> None:
        with self._hold_files(name) as folder:
            try:
                if self._partly[0] != identity:
                    verify(folder)
                    if name in self._there:
                        self._delete(name)
                    self._partly = (identity, set())
                self._there[name] = None
                upload_checkpoint(self._remote, folder, name, self._partly[1], self._claim.check)
                self._there[name] = (folder / MANIFEST).read_bytes()
            except (BrokenCheckpoint, FileNotFoundError) as error:
                if self._local().get(name) != identity:
                    return  # Deleted or replaced meanwhile.
                if not isinstance(error, BrokenCheckpoint):
                    raise
                self._warn(f"{name} is not uploaded: {error}")
                self._broken[name] = identity
                return
        self._uploaded[name] = identity

    @contextlib.contextmanager
    def _hold_files(self, name: str) -> Iterator[Path]:
        """A checkpoint in hard links, as the run may delete it before it is uploaded."""
        held = self._run_dir / OWN_FOLDER / "checkpoint"
        shutil.rmtree(held, ignore_errors=True)
        folder = held
        try:
            shutil.copytree(self._run_dir / name, held, copy_function=os.link)
        except OSError:  # There are none on this disk, or it is gone.
            folder = self._run_dir / name
        try:
            yield folder
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _retract(self, local: _Checkpoints) -> None:
        """Delete remote checkpoints that the run has set aside, as in a rollback."""
        for name, data in list(self._there.items()):
            folder, _, step = name.partition("/")
            number = int(step.removeprefix("step_"))
            if name in local or data is None:
                continue
            if any(is_manifest(p, data) for p in copies_of(self._run_dir / folder, number)):
                self._delete(name)

    def _retain(self, local: _Checkpoints) -> None:
        """Once the latest checkpoint is uploaded: delete those that the run's folder lacks."""
        for folder in FOLDERS:
            latest = next((name for name in local if name.startswith(f"{folder}/")), None)
            if latest is None or self._uploaded.get(latest) != local[latest]:
                continue
            for name in [n for n in self._there if n.startswith(f"{folder}/") and n not in local]:
                self._delete(name)

    def _delete(self, name: str) -> None:
        self._claim.check()
        delete_checkpoint(self._remote, name)
        del self._there[name]
        self._uploaded.pop(name, None)
