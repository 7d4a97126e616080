"""Shared memory between the trainer's ranks and the engines' workers on one machine.

A segment has a name only until everyone has opened it, a fraction of a second. After that the
kernel frees it with the last process that uses it, so nothing remains in ``/dev/shm`` however the
processes end. If they die before, the standard library's resource tracker removes the name.
"""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from torch import Tensor

from rlmath.errors import UserError

FOLDER = Path("/dev/shm")
MIB = 2**20


class NamedSegments:
    """Segments that still have names. The creator's side; ``unlink`` once everyone has opened them.
    Raises UserError: there is not enough shared memory. ``run_id``: part of the names, to
    distinguish runs. ``sizes_bytes``: size of each segment."""

    def __init__(self, run_id: str, sizes_bytes: Sequence[int]) -> None:
        _refuse_unless_free(sizes_bytes)
        self._segments: list[SharedMemory] = []
        prefix = f"rlmath_{''.join(c if c.isalnum() else '-' for c in run_id)[:64]}"
        try:
            for size_bytes in sizes_bytes:
                name = f"{prefix}_{uuid.uuid4().hex[:12]}"
                segment = SharedMemory(name=name, create=True, size=size_bytes)
                self._segments.append(segment)
                # Allocate the memory now: a page missing later is a SIGBUS.
                with open(FOLDER / name, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
        except BaseException as error:
            self.unlink()
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                # Another process took the memory first.
                raise _too_little(sizes_bytes) from None
            raise

    @property
    def names(self) -> list[str]:
        return [segment.name for segment in self._segments]

    def unlink(self) -> None:
        """Remove the names; open segments stay valid. May be called twice."""
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()
            segment.unlink()


def open_segment(name: str) -> int:
    """File descriptor of a segment. Raises FileNotFoundError: no such segment on this machine."""
    try:
        return os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"shared memory segment {name} is not on this machine ({os.uname().nodename}): "
            "weights.transport=shared_memory needs the trainer and all engines on one machine"
        ) from error


def map_writable(descriptor: int) -> Tensor:
    """The segment as a uint8 tensor, shared by all processes."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def map_copy_on_write(descriptor: int) -> mmap.mmap:
    """The segment for reading. (Torch needs writable memory; written pages are private copies.)"""
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _refuse_unless_free(sizes_bytes: Sequence[int]) -> None:
    if sum(sizes_bytes) > _free_bytes():
        raise _too_little(sizes_bytes)


def _free_bytes() -> int:
    stat = os.statvfs(FOLDER)
    return stat.f_bavail * stat.f_frsize


def _too_little(sizes_bytes: Sequence[int]) -> UserError:
    needed_mib, free_mib = sum(sizes_bytes) / MIB, _free_bytes() / MIB
    sizes = " + ".join(f"{size / MIB:.1f}" for size in sizes_bytes)
    return UserError(
        f"weights travel through {sizes} = {needed_mib:.1f} MiB of shared memory, but {FOLDER} "
        f"has {free_mib:.1f} MiB free; set weights.bucket_size_mib to at most "
        f"{max(1, int(free_mib / max(len(sizes_bytes), 1)))} (no smaller than the largest "
        f"tensor helps) or make {FOLDER} larger (docker run --shm-size)"
    )
