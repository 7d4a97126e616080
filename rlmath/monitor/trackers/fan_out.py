"""All of a run's trackers: each fails alone, and none holds up the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmath.monitor.trackers.base import TRACKERS, TrackedRun, Tracker

# For all trackers together, at a run's end.
CLOSE_S = 60.0
_MOST_WAITING = 1000

_Call = Callable[[Tracker], None]


class Trackers:
    """Tells each tracker what it has to show; ``warn`` gets a message, from any thread, once for
    each tracker that fails."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._lines: list[_Inline | _InBackground] = [
            (_Inline if TRACKERS.traits(name).inline else _InBackground)(name, run, warn)
            for name in dict.fromkeys(names)
        ]

    def settings(self, text: str, values: Mapping[str, Any], compared_by: Sequence[str]) -> None:
        values = dict(values)
        self._notify(lambda one: one.settings(text, values, compared_by))

    def step(
        self, step: int, time_s: float, values: Mapping[str, float], texts: Mapping[str, str]
    ) -> None:
        values, texts = dict(values), dict(texts)
        self._notify(lambda one: one.step(step, time_s, values, texts))

    def close(self) -> None:
        """Wait until all is shown, for at most ``CLOSE_S``."""
        until = time.monotonic() + CLOSE_S
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.wait(max(0.0, until - time.monotonic()))

    def _notify(self, call: _Call) -> None:
        for line in self._lines:
            line.notify(call)


class _Inline:
    def __init__(self, name: str, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._tracker: Tracker | None = None
        self._guard(lambda: setattr(self, "_tracker", TRACKERS.get(name)(run)))

    def notify(self, call: _Call) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._guard(lambda: call(tracker))

    def end(self) -> None:
        self.notify(lambda one: one.close())

    def wait(self, seconds: float) -> None:
        """All is done."""

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._tracker = None
            self._warn(failure_warning(self._name, error))


class _InBackground:
    def __init__(self, name: str, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._name, self._run, self._warn = name, run, warn
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MOST_WAITING)
        self._over = False
        # A client that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def notify(self, call: _Call | None) -> None:
        if self._over:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"{_MOST_WAITING} steps wait for it")

    def end(self) -> None:
        self.notify(None)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive() and not self._over:
            self._fail(f"it was not done {CLOSE_S:.0f} s after the run")

    def _work(self) -> None:
        try:
            tracker = TRACKERS.get(self._name)(self._run)
            while (call := self._calls.get()) is not None and not self._over:
                call(tracker)
            tracker.close()
        # Clients raise their own kinds of errors, and SystemExit too.
        except BaseException as error:
            if not self._over:
                self._fail(error)

    def _fail(self, error: BaseException | str) -> None:
        self._over = True
        self._warn(failure_warning(self._name, error))


def failure_warning(name: str, error: BaseException | str) -> str:
    what = error if isinstance(error, str) else f"{type(error).__name__}: {str(error)[:500]}"
    return (
        f"runner.trackers: {name} failed and gets nothing more ({what}); metrics.jsonl "
        "has all metrics"
    )
