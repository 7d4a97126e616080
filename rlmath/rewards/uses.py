"""What rewards are called for, training or evaluation, so that the figures of each stay apart.

With ``rollout.schedule=continuous`` training's groups are graded while held-out problems are.
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
    """Of this thread, or of the context that it was given."""
    return _USE.get()


@contextlib.contextmanager
def used_for(use: Use) -> Iterator[None]:
    """What this thread calls in this block is for this use."""
    token = _USE.set(use)
    try:
        yield
    finally:
        _USE.reset(token)


class PerUse(Generic[T]):
    """Figures of each use. Safe from any thread, if what it holds is.

    Args:
        make: Makes empty ones.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._of: dict[Use, T] = {}

    @property
    def current(self) -> T:
        """Those of the current use."""
        return self.of(current_use())

    def of(self, use: Use) -> T:
        """Those of a use."""
        with self._lock:
            if use not in self._of:
                self._of[use] = self._make()
            return self._of[use]
