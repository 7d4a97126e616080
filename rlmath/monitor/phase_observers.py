"""Plug-ins that observe the phases of a run, for tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rlmath.plugins import NoTraits, Registry


class PhaseObserver(Protocol):
    """Told when each phase begins and ends; phases nest. Made with the folder of the run.

    Called in the thread of the run, so it has to be fast. Any method may raise; nothing is called
    after that.
    """

    def begin(self, phase: str, step: int) -> None:
        """A phase of a step begins, such as ``generate`` or ``update``."""
        ...

    def end(self, phase: str, step: int, seconds: float) -> None:
        """A phase ended after ``seconds``, nested phases included."""
        ...

    def close(self) -> None:
        """Called at the end of the run."""
        ...


# Each is called in a run that imports it.
PHASE_OBSERVERS: Registry[Callable[[Path], PhaseObserver], NoTraits] = Registry(
    "phase observer", NoTraits
)


class PhaseObservers:
    """All of a run's; one that fails is called no more, and never stops the run."""

    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._observers: dict[str, PhaseObserver] = {}
        for name in PHASE_OBSERVERS.in_order():
            self._guard(name, functools.partial(self._make, name, run_dir))

    def begin(self, phase: str, step: int) -> None:
        for name, one in list(self._observers.items()):
            self._guard(name, functools.partial(one.begin, phase, step))

    def end(self, phase: str, step: int, seconds: float) -> None:
        for name, one in list(self._observers.items()):
            self._guard(name, functools.partial(one.end, phase, step, seconds))

    def close(self) -> None:
        for name, one in list(self._observers.items()):
            self._guard(name, one.close)

    def _make(self, name: str, run_dir: Path) -> None:
        self._observers[name] = PHASE_OBSERVERS.get(name)(run_dir)

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._observers.pop(name, None)
            self._warn(
                f"phase observer {name} failed and is called no more "
                f"({type(error).__name__}: {str(error)[:500]})"
            )
