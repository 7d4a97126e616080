"""SIGTERM ends a run at once, but an update or a save comes to its end first: nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class Grace:
    """Calls the handler that was there before: at once between two updates, and during an update
    when its step is done, after ``grace_s``, or with a second signal. A context manager.

    Args:
        grace_s: Seconds that an update may still take; 0: it is not waited for.
        is_updating: Whether an update is under way, in which nothing can be saved.
    """

    def __init__(self, grace_s: float, is_updating: Callable[[], bool]) -> None:
        self._grace_s, self._is_updating = grace_s, is_updating
        self._before: Any = None
        self._timer: threading.Timer | None = None

    def step_done(self) -> None:
        """End the run if it was asked to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._call_before(None)

    def __enter__(self) -> Grace:
        if self._grace_s and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on)
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
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if asked is not None and isinstance(error, Exception):
            # The rest of the job has ended too, as with a signal to all of its processes.
            raise SystemExit(128 + signal.SIGTERM) from error

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self._timer is not None or not self._is_updating():
            self._call_before(frame)
            return
        print(
            f"SIGTERM during an update: the run ends after this step, or in {self._grace_s:g} s "
            "(runner.grace_s)",
            flush=True,
        )
        again = (os.getpid(), signal.SIGTERM)
        self._timer = threading.Timer(self._grace_s, os.kill, again)
        self._timer.daemon = True
        self._timer.start()

    def _call_before(self, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(signal.SIGTERM, frame)
        else:
            raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C that comes in this block take effect at its end; a second one
    does so at once."""
    noted: list[int] = []
    before: dict[int, Handler] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            before[number](number, frame)
            return
        noted.append(number)
        name = signal.Signals(number).name
        print(
            f"{name} during a save: the run ends after it; a second signal ends it now", flush=True
        )

    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(one)
            if callable(handler):
                before[one] = handler
                signal.signal(one, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if noted:
            before[noted[0]](noted[0], None)
