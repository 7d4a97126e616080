"""A fault, and where it is planted."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rlmath.config.schema import Config
from rlmath.training.opening import Running

# Plants a fault, for as long as the context lasts.
Plant = Callable[["Scene"], AbstractContextManager[None]]


@dataclass
class Scene:
    """Where faults are planted: the parts of a run."""

    config: Config
    run: Running
    folder: Path


def _always(config: Config) -> str | None:
    return None


@dataclass(frozen=True)
class Fault:
    """A silent fault, and the alarm that has to fire."""

    name: str  # For --only.
    what: str  # Description for the table.
    where: str  # The process: engine, ranks, driver or data.
    alarm: str  # Expected alarm, for the table.
    says: str  # A part of its message, as a regular expression.
    plant: Plant  # Plants it.
    from_step: int = 2  # The first step that has it.
    # Steps from then on, within which the alarm has to fire; 0: before the first step.
    latest: int = 1
    # Reason why a configuration cannot have the fault; None: it can.
    missing: Callable[[Config], str | None] = field(default=_always)


def scene_fault(
    faults: list[Fault], name: str, alarm: str, says: str, where: str = "driver", **more: Any
) -> Callable[[Callable[[Scene], Any]], Callable[[Scene], Any]]:
    """Register a function that plants a fault: it returns a context manager, or yields once. Its
    docstring is ``Fault.what``."""

    def register(plant: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
        inside = contextlib.contextmanager(plant) if inspect.isgeneratorfunction(plant) else plant
        faults.append(Fault(name, sentence(plant), where, alarm, says, inside, **more))
        return plant

    return register


def patch(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Put ``change(original, *arguments)`` in the place of a function of the driver."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *given, **more: change(original, *given, **more))


def sentence(function: Callable[..., Any]) -> str:
    """The docstring of a function, as a part of a table's row."""
    text = " ".join((function.__doc__ or "").split()).removesuffix(".")
    return text if text.startswith("Adam") else text[:1].lower() + text[1:]
