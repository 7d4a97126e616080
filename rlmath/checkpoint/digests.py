"""Checksums of a checkpoint's files; of a rank's file while it is written, in a note beside it.

A manifest has the checksum of every file. If the driver computes those of the ranks' files, it
reads the whole checkpoint back: minutes for the terabyte of 72 billion parameters. A rank hashes
what it writes while it writes it, and the driver takes its word.

The checksum is XXH3-128, which finds damage and is several times as fast as a disk. It does not
stop somebody who forges a checkpoint, and neither did SHA-256 beside the file that it vouches for.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

ALGORITHM = "xxh3_128"
# Suffix of the note's file, which exists only until the manifest is written.
SUFFIX = ".xxh3"
_CHUNK_BYTES = 1 << 20
# A file that changes twice within a tick of the kernel's clock looks the same after both.
_SETTLED_NS = 2 * 10**9
# Checksums that this process has computed, by file identity, size and times.
_computed: dict[tuple[Any, ...], str] = {}
# Below it handing bytes to another thread costs more than hashing them.
_LEAST_BYTES_FOR_THREAD = 1 << 16
# Sync while writing continues, so that the last fsync has little left to do.
_SYNC_BYTES = 128 << 20


class HashedStream:
    """A file opened for writing that is hashed as it grows. It can only be appended to."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="digest")
        self._synced_bytes = 0
        self._sync: Future[None] | None = None

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        self._num_bytes += num_bytes
        if num_bytes < _LEAST_BYTES_FOR_THREAD:
            self._hash.update(data)
            return self._file.write(data)
        hashed = self._threads.submit(self._hash.update, data)
        try:
            written = self._file.write(data)
        finally:
            # The caller may change the bytes once this returns.
            hashed.result()
        if self._num_bytes - self._synced_bytes >= _SYNC_BYTES and (
            self._sync is None or self._sync.done()
        ):
            self._wait_for_sync()
            self._synced_bytes = self._num_bytes
            self._sync = self._threads.submit(os.fdatasync, self._file.fileno())
        return written

    def _wait_for_sync(self) -> None:
        """Raise an earlier error of the disk, which the system reports only once."""
        if self._sync is not None:
            sync, self._sync = self._sync, None
            sync.result()

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; it may be closed already. Raises OSError: the disk failed to hold a part
        that was written."""
        self._threads.shutdown()
        self._file.close()
        self._wait_for_sync()

    def note(self) -> str:
        """Size in bytes and checksum of the written bytes."""
        return f"{self._num_bytes} {self._hash.hexdigest()}\n"


@contextlib.contextmanager
def hashed_stream(path: Path) -> Iterator[HashedStream]:
    """Open a file for writing; if that succeeds, a note beside it has what was written."""
    with open(path, "wb") as file:
        stream = HashedStream(file)
        try:
            yield stream
        finally:
            stream.close()
    path.with_name(path.name + SUFFIX).write_text(stream.note(), encoding="ascii")


def take_note(path: Path) -> tuple[int, str] | None:
    """Size and checksum that a file's writer noted, and remove the note; ``None``: there is none.
    Raises OSError: the file has another size than its writer gave it."""
    note = path.with_name(path.name + SUFFIX)
    try:
        size, digest = note.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return None
    found = path.stat().st_size
    if found != int(size):
        raise OSError(f"{path} has {found} bytes instead of {size}")
    note.unlink()
    return found, digest


def file_digest(path: Path) -> str:
    """Checksum of a file, as hexadecimal digits. A file that has not changed since this process
    hashed it is not read again. Raises OSError: the file cannot be read."""
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if key in _computed:
            return _computed[key]
        is_settled = time.time_ns() - found.st_ctime_ns > _SETTLED_NS
        digest = xxhash.xxh3_128()
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
    if is_settled:
        _computed[key] = digest.hexdigest()
    return str(digest.hexdigest())
