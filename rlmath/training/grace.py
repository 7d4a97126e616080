"""A signal that ends a run loses no step: an update is stopped before it changes anything, or comes
to its end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlmath.actor.group import ActorGroup
from rlmath.config.schema import Config
from rlmath.utils.ending_signals import on_ending_signals, put_back


class Grace:
    """Calls the handlers that were there before: at once between two updates, and during an update
    when it was stopped or its step is done, after ``grace_s``, or with a second signal. A context
    manager.

    Args:
        grace_s: Seconds that an update may still take; 0: it is not waited for.
        is_updating: Whether an update is running, in which nothing can be saved.
        ask_to_stop: Lets the ranks end the pass that they are in early, unless the step has changed
            weights. An update that is stopped raises an error.
    """

    def __init__(
        self,
        grace_s: float,
        is_updating: Callable[[], bool],
        ask_to_stop: Callable[[], object] = lambda: None,
    ) -> None:
        self._grace_s, self._is_updating = grace_s, is_updating
        self._ask_to_stop = ask_to_stop
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        asked, self._timer = self._timer, None
        if asked is not None:
            asked.cancel()
        put_back(self._before)
        if asked is not None and isinstance(error, Exception):
            # The update was stopped; or the rest of the job has ended too, as with a signal to all
            # of its processes.
            raise SystemExit(128 + self._number) from error

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self._timer is not None:
            self._call_before(frame)
            return
        self._number = signal.Signals(number)
        self._ask_to_stop()
        if not self._is_updating():
            self._call_before(frame)
            return
        print(
            f"{self._number.name} during an update: it stops if it has not changed weights yet; "
            f"else the run ends after this step, or in {self._grace_s:g} s (runner.grace_s)",
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


def grace_of(config: Config, actor: ActorGroup) -> Grace:
    """The grace of a run, whose ranks can be asked to stop."""
    return Grace(config.runner.grace_s, lambda: actor.changed, lambda: actor.ask_to_stop())
