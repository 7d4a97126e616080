"""A signal that ends a run does so at once, but lets an update come to its end: nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rlmath.utils.ending_signals import on_ending_signals, put_back


class Grace:
    """Calls the handlers that were there before: at once between two updates, and during an update
    when its step is done, after ``grace_s``, or with a second signal. A context manager.

    Args:
        grace_s: Seconds that an update may still take; 0: it is not waited for.
        is_updating: Whether an update is running, in which nothing can be saved.
    """

    def __init__(self, grace_s: float, is_updating: Callable[[], bool]) -> None:
        self._grace_s, self._is_updating = grace_s, is_updating
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._number = signal.SIGTERM

    def step_done(self) -> None:
        """End the run if it was asked to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._call_before(None)

    def __enter__(self) -> Grace:
        if self._grace_s:
            self._before = on_ending_signals(self._on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asked, self._timer = self._timer, None
        if asked is not None:
            asked.cancel()
        put_back(self._before)
        if asked is not None and isinstance(error, Exception):
            # The rest of the job has ended too, as with a signal to all of its processes.
            raise SystemExit(128 + self._number) from error

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self._timer is not None:
            self._call_before(frame)
            return
        self._number = signal.Signals(number)
        if not self._is_updating():
            self._call_before(frame)
            return
        print(
            f"{self._number.name} during an update: the run ends after this step, or in "
            f"{self._grace_s:g} s (runner.grace_s)",
            flush=True,
        )
        again = (os.getpid(), signal.SIGTERM)
        self._timer = threading.Timer(self._grace_s, os.kill, again)
        self._timer.daemon = True
        self._timer.start()

    def _call_before(self, frame: FrameType | None) -> None:
        before = self._before.get(self._number)
        if callable(before):
            before(self._number, frame)
        else:
            raise SystemExit(128 + self._number)
