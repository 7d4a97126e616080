"""Stop calling a server that keeps failing, and retry after a cooldown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Circuit breaker of one server. Thread-safe.

    After ``failures`` consecutive failures no call is allowed for ``cooldown_s``. After that, one
    call at a time is allowed, until one succeeds.
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
        """Whether a call may be made now. After a cooldown, only the first caller may."""
        with self._lock:
            if self._failed < self._failures:
                return True
            if self._clock() < self._closed_at:
                return False
            self._closed_at = self._clock() + self._cooldown_s
            return True

    def record_success(self) -> None:
        with self._lock:
            self._failed = 0

    def record_failure(self) -> None:
        """Record a failed call: no answer, or the server reported that it is unavailable."""
        with self._lock:
            self._failed += 1
            if self._failed == self._failures:
                self._closed_at = self._clock() + self._cooldown_s
