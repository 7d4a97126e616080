"""Figures and problems that a check reports while it runs.

Every call appends one line to a file, so that a check that hangs or crashes leaves what it had
measured until then.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Value = float | int | str | bool


def phase_words(phases: list[str]) -> str:
    """Words for a message, such as ``in the phase 'load'`` after a space; empty outside any."""
    return f" in the phase {phases[-1]!r}" if phases else ""


class Record:
    """The lines of one check, written in its process. ``path``: file that is appended to; its
    folder has to exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.open_phases: list[str] = []

    def figure(
        self, name: str, value: Value, unit: str = "", *, limit: str = "", key: bool = False
    ) -> None:
        """Report a number or a word.

        Args:
            unit: Unit of the value, such as ``GiB``; none for a ratio or a word.
            limit: Allowed values, such as ``<= 1.02``, if there is a limit.
            key: Show it in the line of the terminal as well.
        """
        self._write("figure", name=name, value=value, unit=unit, limit=limit, key=key)

    def fail(self, problem: str, advice: str = "") -> None:
        """Report that something is wrong; the check continues, and counts as failed. ``advice``:
        how to fix it; empty: the check's general advice."""
        self._write("problem", problem=problem, advice=advice)

    def require(self, holds: bool, problem: str, advice: str = "") -> None:
        """``fail`` unless it holds."""
        if not holds:
            self.fail(problem, advice)

    def not_applicable(self, part: str, reason: str) -> None:
        """Report a part of the check that cannot run on this machine; ``part`` "": all of it."""
        self._write("not_applicable", part=part, reason=reason)

    def text(self, title: str, content: str) -> None:
        """Keep a longer text for the file, such as a table of another program."""
        self._write("text", title=title, content=content)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the current phase, for the message if the check ends in it."""
        started_s = time.monotonic()
        self.phase_begins(name)
        yield
        self.open_phases.remove(name)
        self._write("phase_end", name=name, seconds=round(time.monotonic() - started_s, 2))

    def phase_begins(self, name: str) -> None:
        """As ``phase``, without an end."""
        self.open_phases.append(name)
        self._write("phase", name=name)

    def end(self) -> None:
        """Report that the check has come to its end."""
        self._write("end")

    def _write(self, event: str, **content: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **content}) + "\n")


@dataclass
class Outcome:
    """The lines of a check, put together."""

    # name, value, unit, limit, key of each.
    figures: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)  # problem and advice of each.
    not_applicable: list[dict[str, str]] = field(default_factory=list)  # part and reason of each.
    texts: list[dict[str, str]] = field(default_factory=list)  # title and content of each.
    phases_s: dict[str, float] = field(default_factory=dict)  # Seconds of each phase that ended.
    # Phases that did not end, the innermost last.
    open_phases: list[str] = field(default_factory=list)
    ended: bool = False  # The check came to its end.

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not applicable``."""
        if self.problems or not self.ended:
            return "failed"
        if any(not one["part"] for one in self.not_applicable):
            return "not applicable"
        return "passed"


def read_outcome(path: Path) -> Outcome:
    """Read what a check wrote; a last line that was cut off is left out."""
    outcome = Outcome()
    lists = {
        "figure": outcome.figures,
        "problem": outcome.problems,
        "not_applicable": outcome.not_applicable,
        "text": outcome.texts,
    }
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        event = content.pop("event")
        if event in lists:
            lists[event].append(content)
        elif event == "phase":
            outcome.open_phases.append(content["name"])
        elif event == "phase_end":
            outcome.phases_s[content["name"]] = content["seconds"]
            outcome.open_phases.remove(content["name"])
        elif event == "end":
            outcome.ended = True
    return outcome
