"""Writes a rank's file in a child process, beside training.

A thread of the rank needs the interpreter lock for each of the forty pieces in which torch writes
a tensor, and a rank that launches kernels needs it too: both take longer
(``benchmarks/checkpoint.py --busy``). The child shares the memory with the rank's host copies. It
writes one file and ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmath.utils.child_processes import end_with_parent

_ALIGNMENT_BYTES = 64
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlmath.checkpoint.child_writer import main; main(*map(int, sys.argv[2:]))"
)


@dataclass(frozen=True)
class _Place:
    """A tensor in shared memory: its first byte, shape and strides."""

    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class SharedMemory:
    """Host memory that a child process can be given. ``/dev/shm``, which is 64 MiB in a container,
    does not limit it. It is freed with the last tensor in it.

    Args:
        num_bytes: From :meth:`size_of`. Pages count once they are written.
        descriptor: The parent's, in the child; ``None`` makes new memory.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.descriptor = os.memfd_create("checkpoint") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, self.num_bytes)
        self._map = mmap.mmap(self.descriptor, self.num_bytes)
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._used = 0
        weakref.finalize(self, os.close, self.descriptor)

    @staticmethod
    def size_of(tensors: Sequence[Tensor]) -> int:
        """Bytes that copies of the tensors take."""
        return sum(-(-one.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for one in tensors)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the next free bytes."""
        begin = self._used
        num_elements = math.prod(shape)
        self._used += -(-num_elements * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._elements(begin, num_elements, dtype).view(tuple(shape))

    def _elements(self, begin: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor with a storage of these bytes alone: torch saves whole storages."""
        if not num_elements:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=begin)

    def place(self, tensor: Tensor) -> _Place:
        """The place of a tensor, or of a view of one. Raises ValueError: it is not in this
        memory."""
        offset = tensor.data_ptr() - self._begin if tensor.numel() else 0
        if not 0 <= offset < self.num_bytes:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not in shared memory")
        return _Place(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self, place: _Place) -> Tensor:
        if 0 in place.shape:
            return torch.empty(place.shape, dtype=place.dtype)
        span = 1 + sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
        elements = self._elements(place.offset_bytes, span, place.dtype)
        return elements.as_strided(place.shape, place.stride)


@dataclass(frozen=True)
class _Given:
    """The part of a torch planner that a writer asks: an item's tensor or bytes."""

    data: dict[int, Any]

    def resolve_data(self, item: Any) -> Any:
        return self.data[id(item)]


class ChildWriter:
    """A child process that writes one file of the tensors in a new shared memory.

    It starts here, to import torch while the memory is filled, and ends if the writer is dropped
    before :meth:`write`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.memory = SharedMemory(SharedMemory.size_of(tensors))
        self._connection, theirs = Pipe()
        inherited = (theirs.fileno(), self.memory.descriptor)
        paths = json.dumps([path for path in sys.path if path])
        numbers = (*inherited, self.memory.num_bytes, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _PROGRAM, paths, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            # Ctrl-C is for the driver: a checkpoint that was begun is finished.
            start_new_session=True,
        )
        theirs.close()

    def write(self, folder: Path, plan: Any, planner: Any) -> list[Any]:
        """Write the files of a rank's plan of torch's distributed format, and end the process.

        Args:
            planner: All its tensors are in ``memory``, and do not change meanwhile.

        Returns:
            The results of torch's ``write_data``.

        Raises:
            OSError: It could not be written, or the process was killed.
            ValueError: A tensor is elsewhere.
        """
        data = [planner.resolve_data(item) for item in plan.items]
        reply: Any = None
        with self._connection as connection:
            given = [
                self.memory.place(one) if isinstance(one, Tensor) else one.getvalue()
                for one in data
            ]
            with contextlib.suppress(EOFError, ConnectionError):
                connection.send((folder, plan, given))
                reply = connection.recv()
        status = self._process.wait()
        if reply is None:
            raise OSError(
                f"the process that writes the rank's file ended with status {status}"
                + (", as when memory runs out" if status == -9 else "; its log has the error")
            )
        if isinstance(reply, OSError):
            raise reply
        return list(reply)


def main(connection: int, descriptor: int, num_bytes: int, parent_pid: int) -> None:
    """Write one file for the rank at the other end of an inherited connection."""
    end_with_parent(parent_pid)
    import torch.distributed.checkpoint  # Takes a second; the rank is copying.

    from rlmath.checkpoint.writer import checkpoint_writer

    torch.set_num_threads(1)
    rank = Connection(connection)
    try:
        folder, plan, given = rank.recv()
    except EOFError:  # There was no save after all.
        return
    memory = SharedMemory(num_bytes, descriptor)
    data = [memory.tensor(one) if isinstance(one, _Place) else io.BytesIO(one) for one in given]
    planner = _Given({id(item): one for item, one in zip(plan.items, data, strict=True)})
    try:
        rank.send(checkpoint_writer(folder).write_data(plan, planner).wait())
    except OSError as error:
        rank.send(error)
    os._exit(0)  # An interpreter with torch takes half a second to end, and the rank waits.
