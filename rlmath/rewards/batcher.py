"""Batches of items that arrive one by one, by count or time window."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    """Send items in batches of at most ``batch_size``, in order of arrival.

    A full batch is sent immediately. An incomplete batch is sent ``window_s`` after its first item
    arrived, so the last samples of a step do not wait forever. Thread-safe. ``send`` must not
    block.
    """

    def __init__(self, batch_size: int, window_s: float, send: Callable[[list[T]], None]) -> None:
        self._batch_size, self._window_s, self._send = batch_size, window_s, send
        self._waiting: list[T] = []
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()

    def add(self, items: Sequence[T]) -> bool:
        """Queue items; after :meth:`close`, ``False``, and they are not queued."""
        full = []
        with self._lock:
            if self._closed:
                return False
            self._waiting += items
            while len(self._waiting) >= self._batch_size:
                full.append(self._waiting[: self._batch_size])
                del self._waiting[: self._batch_size]
            if not self._waiting:
                self._stop_timer()
            elif self._timer is None or full:
                # The remaining items arrived with this call.
                self._stop_timer()
                self._timer = threading.Timer(self._window_s, self.flush)
                self._timer.daemon = True
                self._timer.start()
        for batch in full:
            self._send(batch)
        return True

    def flush(self) -> None:
        with self._lock:
            self._stop_timer()
            batch, self._waiting = self._waiting, []
        if batch:
            self._send(batch)

    def close(self) -> list[T]:
        """Stop accepting items and return those that were not sent."""
        with self._lock:
            self._closed = True
            self._stop_timer()
            left, self._waiting = self._waiting, []
        return left

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
