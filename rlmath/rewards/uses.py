"""The use of a reward call, training or evaluation, which keeps their metrics separate.

With ``rollout.schedule=continuous`` both are graded at the same time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class Use(StrEnum):
    training = "training"
    evaluation = "evaluation"


_USE: ContextVar[Use] = ContextVar("use", default=Use.training)


def current_use() -> Use:
    return _USE.get()


@contextlib.contextmanager
def use_for(use: Use) -> Iterator[None]:
    """Set the use of the calls in this block."""
    token = _USE.set(use)
    try:
        yield
    finally:
        _USE.reset(token)


class PerUse(Generic[T]):
    """An object per use. Thread-safe if the objects are."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._of: dict[Use, T] = {}

    @property
    def current(self) -> T:
        return self.of(current_use())

    def of(self, use: Use) -> T:
        with self._lock:
            if use not in self._of:
                self._of[use] = self._make()
            return self._of[use]
