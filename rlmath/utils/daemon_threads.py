"""Threads for calls that may never return: a user's reward, or a call of a hanging rank.

At exit Python waits for every thread of a ``ThreadPoolExecutor``, so one stuck call would keep a
finished run, and its job's machines, forever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs calls in daemon threads, in order of submission. ``count``: number of concurrent calls.
    ``name``: prefix of the threads' names."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call ``function(*arguments)`` in a thread and return its future result. Raises
        RuntimeError: after :meth:`close`."""
        future: Future[T] = Future()

        def call() -> None:
            with self._lock:
                self._waiting.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} have ended")
            self._waiting.add(future)
            self._calls.put(call)
            if len(self._threads) < self._count:
                self._start()
        return future

    def add_one(self) -> None:
        """Allow one more concurrent call, where one may never return."""
        with self._lock:
            self._count += 1
            if self._waiting and not self._closed:
                self._start()

    def end_one(self) -> None:
        """Undo :meth:`add_one`, as that call has returned."""
        with self._lock:
            self._count -= 1
            if len(self._threads) > self._count:
                self._threads.pop()
                self._calls.put(None)

    def close(self, wait_s: float = 0.0) -> bool:
        """Accept no more calls, and cancel those not yet started. ``wait_s``: how long to wait for
        running calls, in seconds. Returns whether no call is running."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
            for _ in self._threads:
                self._calls.put(None)
        for future in waiting:
            future.cancel()
        until_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
        self._threads[-1].start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # It references its result.
