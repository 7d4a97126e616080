"""A queue of device work beside the one that a caller uses.

A CPU does things in the order in which they are called. A GPU does so within a stream only: what
one stream writes and another reads needs an event between them, in both directions. The second one
is easily forgotten. Memory that the reader drops goes back to the stream that allocated it, which
writes there again while the reader may still be at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class SideStream:
    """Where there is one queue: nothing is to be waited for."""

    def start(self) -> None:
        """Let what the caller has queued so far come before all that is queued here."""

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        """Queue here what the block does, after everything that readers have queued so far."""
        yield

    def hand_over(self) -> None:
        """Make the present stream a reader: it waits for the last ``queue``. Not within one."""

    def wait(self) -> None:
        """Return when all that was queued here is done."""


class CudaSideStream(SideStream):
    """A separate CUDA stream.

    What is allocated within ``queue`` may be dropped by a reader as soon as its reads are queued.
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
