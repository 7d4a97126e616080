"""A lock that allows one run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rlmath.errors import UserError

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def only_run_in(folder: str | Path) -> Iterator[None]:
    """Lock a folder for the duration of a run. The file names the process, and its end removes it;
    the kernel releases the lock of a process that was killed.

    On a file system without locks the run continues with a warning: such file systems are common on
    clusters, and refusing would forbid every run there. Raises UserError: another run holds it.
    """
    path = Path(folder) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"runner.run_dir={folder}: a run is active there ({file.read().strip()}); "
                    "wait for its end, or give another folder. The lock of a machine that is lost "
                    f"may stay on NFS: then delete {path}"
                ) from None
            except OSError as error:
                print(
                    f"warning: runner.run_dir={folder} is not locked: {path} cannot be locked "
                    f"there ({error.strerror or error}). A second run in this folder would not be "
                    "refused and would overwrite this one's files; make sure that none is active",
                    flush=True,
                )
            else:
                if not _is_named(path, file):  # A run that just ended removed it.
                    continue
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return


def _is_named(path: Path, file: TextIO) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
