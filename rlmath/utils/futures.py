"""Wait for several futures without blocking a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def when_all(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the last of ``futures`` is done.

    It runs in the thread that completes the last one, or here if all are already done. It must not
    raise, because the error would be lost. The futures drop their reference to it after the call.
    """
    left = len(futures)
    lock = threading.Lock()
    # A future keeps its callbacks forever: one that references the futures would be a cycle.
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
    """All results, in order; or the first failure in that order, once all are done."""
    result: Future[list[T]] = Future()

    def finish() -> None:
        resolve(result, lambda: [future.result() for future in futures])

    when_all(futures, finish)
    return result


def resolve(future: Future[T], value: Callable[[], T]) -> None:
    """Complete ``future`` with the result or exception of ``value``; a cancelled one is skipped."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(value())
    except BaseException as error:
        future.set_exception(error)
