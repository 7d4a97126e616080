"""Folders for compiled code on a node's own disk. ``~/.cache`` is often on a shared file system,
where hundreds of processes would write thousands of small files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

# Lock file of a folder, held by the process that writes there.
LOCK = ".lock"


def node_cache() -> Path:
    """The node's folder for compiled code, below that for temporary files (``TMPDIR``). Raises
    PermissionError: others can write there, so this process would run their code."""
    root = Path(tempfile.gettempdir()) / f"rlmath_compiled_{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = root.lstat()
    if root.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{root} belongs to another user or is open to others; set TMPDIR")
    return root


def seed(folder: Path, archive: Path) -> None:
    """Fill a folder that only contains its lock from an archive, if there is one. ``folder``: a
    folder of this process alone. ``archive``: code compiled by another process, see :func:`save`.
    """
    if {one.name for one in folder.iterdir()} - {LOCK} or not archive.is_file():
        return
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    # Unreadable parts are compiled again; a killed process leaves nothing incomplete.
    with contextlib.suppress(OSError, tarfile.TarError):
        with tarfile.open(archive) as tar:
            tar.extractall(made, filter="data")
        for one in made.iterdir():
            one.rename(folder / one.name)
    shutil.rmtree(made, ignore_errors=True)


def save(folder: Path, archive: Path) -> None:
    """Write a folder's files to an archive, unless that is newer than all of them; atomic."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != LOCK]
    newest = max((file.stat().st_mtime for file in files), default=0.0)
    if not files or (archive.is_file() and archive.stat().st_mtime >= newest):
        return
    made = archive.with_name(f"{archive.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # A full disk costs only a compilation.
        with tarfile.open(made, "w") as tar:
            for one in sorted(folder.iterdir()):
                if one.name != LOCK:
                    tar.add(one, arcname=one.name)
        made.replace(archive)
    made.unlink(missing_ok=True)
