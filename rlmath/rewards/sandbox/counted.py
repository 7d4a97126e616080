"""Counts of program runs, timeouts and provider failures."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rlmath.rewards.sandbox.provider import Execution, PreparedProgram


class RunCounts:
    """Counts since the last :meth:`drain`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = self._timeouts = self._provider_errors = 0

    def add(self, execution: Execution) -> None:
        with self._lock:
            self._runs += 1
            self._timeouts += execution.status == "timeout"

    def add_provider_error(self) -> None:
        with self._lock:
            self._provider_errors += 1

    def drain(self) -> tuple[int, int, int]:
        """Return runs, timeouts and provider failures, and reset them."""
        with self._lock:
            found = self._runs, self._timeouts, self._provider_errors
            self._runs = self._timeouts = self._provider_errors = 0
        return found


class CountedProgram(PreparedProgram):
    """A prepared program that counts its runs."""

    def __init__(self, program: PreparedProgram, counts: RunCounts) -> None:
        self._program, self._counts = program, counts

    @property
    def compile_error(self) -> str | None:  # type: ignore[override]
        """The program's compile error; with a remote compiler, known only after the first run."""
        return self._program.compile_error

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        execution = self._program.run(stdin, files)
        self._counts.add(execution)
        return execution

    def close(self) -> None:
        self._program.close()
