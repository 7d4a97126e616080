from __future__ import annotations

from collections.abc import Mapping

from rlmath.rewards.sandbox.provider import Execution, PreparedProgram
from rlmath.rewards.stats import Counts

# Names of metrics.
SANDBOX_RUNS = "sandbox_runs"
SANDBOX_TIMEOUTS = "sandbox_timeouts"


class CountedProgram(PreparedProgram):
    def __init__(self, program: PreparedProgram, counts: Counts) -> None:
        self._program, self._counts = program, counts

    @property
    def compile_error(self) -> str | None:  # type: ignore[override]
        """The program's compile error; with a remote compiler, known only after the first run."""
        return self._program.compile_error

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        execution = self._program.run(stdin, files)
        self._counts.add(SANDBOX_RUNS)
        self._counts.add(SANDBOX_TIMEOUTS, execution.status == "timeout")
        return execution

    def close(self) -> None:
        self._program.close()
