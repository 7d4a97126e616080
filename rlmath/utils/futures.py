"""Waiting for several futures without holding a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def when_all(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the last of ``futures`` is done.

    It runs in the thread that completes the last one, or here if all are done already. It must not
    raise: nobody would see it. The futures do not keep it, and what it holds, once it was called.
    """
    left = len(futures)
    lock = threading.Lock()
    # A future keeps its callbacks for good: one that held the futures would make a cycle.
    to_call = [callback]

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            to_call.pop()()

    if not futures:
        callback()
    for future in futures:
        future.add_done_callback(one_done)


def gather(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """The results of all, in order; or the first failure in that order, once all are done."""
    result: Future[list[T]] = Future()

    def finish() -> None:
        resolve(result, lambda: [future.result() for future in futures])

    when_all(futures, finish)
    return result


def resolve(future: Future[T], value: Callable[[], T]) -> None:
    """Complete ``future`` with what ``value`` returns or raises; a cancelled one is left alone."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(value())
    except BaseException as error:
        future.set_exception(error)
