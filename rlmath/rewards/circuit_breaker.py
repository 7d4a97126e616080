"""Stops calling a server that fails every time, and tries it again after a cooldown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Of one server. Safe from any thread.

    After ``failures`` failed calls in a row no call is allowed for ``cooldown_s``; then one call at
    a time is, until one succeeds.

    Args:
        failures: Failed calls in a row that open it.
        cooldown_s: How long it stays open, in seconds.
        clock: Seconds that only grow.
    """

    def __init__(
        self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures, self._cooldown_s, self._clock = failures, cooldown_s, clock
        self._failed = 0
        self._closed_at = 0.0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the server failed too often and has not answered since."""
        with self._lock:
            return self._failed >= self._failures

    def allows(self) -> bool:
        """Whether to make a call now. After a cooldown, only the first asker may."""
        with self._lock:
            if self._failed < self._failures:
                return True
            if self._clock() < self._closed_at:
                return False
            self._closed_at = self._clock() + self._cooldown_s
            return True

    def succeeded(self) -> None:
        """The server answered."""
        with self._lock:
            self._failed = 0

    def failed(self) -> None:
        """The server did not answer, or said that it cannot now."""
        with self._lock:
            self._failed += 1
            if self._failed == self._failures:
                self._closed_at = self._clock() + self._cooldown_s
