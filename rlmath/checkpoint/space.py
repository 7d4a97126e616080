"""Disk space that checkpoints need, and the message when there is too little."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rlmath.errors import UserError
from rlmath.utils.sizes import in_words

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Headers, manifest and driver state, beside the tensors.
_OVERHEAD_BYTES = 2**20
# A disk with less free space counts as full.
_FULL_BYTES = 2**20


class DiskFull(UserError):
    """There is no room for a checkpoint."""


def checkpoint_bytes(num_parameters: int, parameter_bytes: int, distributed_optimizer: bool) -> int:
    """Size of one checkpoint, in bytes.

    Weights as they are, two float32 moments of Adam, and the float32 main parameters where the
    optimizer has some apart from the weights. ``parameter_bytes``: 4 for float32, 2 for bfloat16.
    ``distributed_optimizer``: it always keeps main parameters; the plain one only under bfloat16.
    """
    per_parameter = parameter_bytes + 8
    if distributed_optimizer or parameter_bytes < 4:
        per_parameter += 4
    return num_parameters * per_parameter + _OVERHEAD_BYTES


def held_bytes(folder: str | Path) -> int:
    """Size of the files in a folder; 0 when it is not there."""
    files = (p for p in Path(folder).rglob("*") if p.is_file())
    return sum(p.stat().st_size for p in files)


def disk_full(folder: Path) -> DiskFull:
    """The error of a disk that ran full while ``folder`` was written."""
    return DiskFull(
        f"The disk ran full while {folder} was written; free are {in_words(_free_bytes(folder))}."
        " Earlier checkpoints are untouched. Free some space or set "
        "runner.keep_checkpoints lower, then start again."
    )


def require_free(folder: Path, num_bytes: int) -> None:
    """Raise DiskFull if the disk of ``folder`` has less than ``num_bytes`` free."""
    if (free := _free_bytes(folder)) < num_bytes:
        raise DiskFull(
            f"{folder} needs {in_words(num_bytes)}, and {in_words(free)} are free; free some space"
        )


@contextlib.contextmanager
def naming_full_disk(folder: Path, resumes: Callable[[], str]) -> Iterator[None]:
    """Let a full disk end this block with an error that names the folder and where to resume.
    ``folder``: where most files are written: the system names no file of which it could not write
    the rest. Raises DiskFull: a file could not be written."""
    try:
        yield
    except DiskFull as error:
        raise DiskFull(f"{error} {resumes()}") from None
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise DiskFull(f"{disk_full(_full_folder(error, folder))} {resumes()}") from error


def _full_folder(error: BaseException, folder: Path) -> Path:
    """The folder that an error names, or the full one of those that a run writes to."""
    if isinstance(error, OSError) and error.filename is not None:
        return Path(os.fsdecode(error.filename)).parent
    candidates = (folder, Path(tempfile.gettempdir()), Path("/dev/shm"))
    full = (one for one in candidates if one.exists() and _free_bytes(one) < _FULL_BYTES)
    return next(full, folder)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a full disk or a used-up quota."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
