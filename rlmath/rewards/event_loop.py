"""The event loop, in its own thread, that runs all async rewards.

A loop per call would break rewards that keep an HTTP session or a semaphore between calls, and
``asyncio.run`` does not work in a thread that already runs a loop (a Ray async actor).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class CalledExitError(Exception):
    """A coroutine called ``sys.exit``."""


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_pid = 0  # a fork copies the loop but not the thread that runs it


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _loop_pid
    with _lock:
        if _loop is None or _loop.is_closed() or _loop_pid != os.getpid():
            _loop = asyncio.new_event_loop()
            _loop_pid = os.getpid()
            threading.Thread(target=_loop.run_forever, name="async-rewards", daemon=True).start()
        return _loop


async def _wait(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except SystemExit as error:
        # SystemExit would end the loop, and callers would wait forever.
        text = f"SystemExit: {error}"
        raise CalledExitError(text).with_traceback(error.__traceback__) from None


def start_coroutine(awaitable: Awaitable[T]) -> Future[T]:
    """Start on the shared loop, from any thread; returns immediately."""
    return asyncio.run_coroutine_threadsafe(_wait(awaitable), _running_loop())


def run_coroutine(awaitable: Awaitable[T]) -> T:
    """Run on the shared loop, wait, and return the result. For any other thread. Raises
    RuntimeError: called from the shared loop itself, which would deadlock; BaseException: an
    exception of the coroutine is raised here."""
    loop = _running_loop()
    if _is_this_loop(loop):
        raise RuntimeError("an async reward called another async reward through its sync form")
    return asyncio.run_coroutine_threadsafe(_wait(awaitable), loop).result()


def _is_this_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
