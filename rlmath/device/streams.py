"""A queue of device work beside the caller's.

A CPU does work in the order of calls, a GPU within a stream only: memory that one stream writes and
another reads needs an event between them, in both directions. The second is easily forgotten:
memory that the reader drops returns to the stream that allocated it, which may overwrite it while
the reader still reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """A side stream where there is only one queue, so nothing to wait for."""

    def start(self) -> None:
        """Order everything queued here after the work that the caller has queued so far."""

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Queue the block's work here, after everything that readers have queued so far."""
        yield

    def hand_over(self) -> None:
        """Make the present stream a reader, which waits for the last ``queue``. Not within one."""

    def wait(self) -> None:
        """Wait until all work queued here is done."""


class CudaSideStream(SideStream):
    """A separate CUDA stream.

    A reader may drop memory allocated within ``queue`` as soon as its reads are queued.
    """

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()
        self._done: Any = None
        self._readers: list[Any] = []

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        for reader in self._readers:
            self._stream.wait_stream(reader)
        with torch.cuda.stream(self._stream):
            yield
            self._done = self._stream.record_event()

    def hand_over(self) -> None:
        reader: Any = torch.cuda.current_stream()
        if self._done is not None:
            reader.wait_event(self._done)
        if reader not in self._readers:
            self._readers.append(reader)

    def wait(self) -> None:
        self._stream.synchronize()
