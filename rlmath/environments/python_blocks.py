"""Python in a sandbox of this machine, a new one for each call."""

from __future__ import annotations

from rlmath.environments.base import (
    CallStatus,
    End,
    Environment,
    Episode,
    InfrastructureError,
    Observation,
    ToolCall,
    ToolResult,
    Turn,
    TurnFormat,
)
from rlmath.rewards.sandbox.provider import (
    CodeProvider,
    Execution,
    Limits,
    Program,
    ProviderError,
    Status,
)
from rlmath.types import Problem

_STATUSES: dict[Status, CallStatus] = {"ok": "ok", "timeout": "timeout", "memory": "memory"}


class PythonBlocks(Environment):
    """Runs the programs that the model writes, each on its own.

    Args:
        turn_format: Finds them in the model's turns.
        provider: Runs them; closed with this.
        call_timeout_s: Wall time of a call.
        max_calls: Calls of a sample; further ones are refused.
    """

    has_state = False

    def __init__(
        self,
        turn_format: TurnFormat,
        provider: CodeProvider,
        call_timeout_s: float,
        max_calls: int,
    ) -> None:
        self.turn_format, self.provider = turn_format, provider
        self.max_calls = max_calls
        self.limits = Limits(
            cpu_s=max(1, round(call_timeout_s)), wall_s=call_timeout_s, output_kib=64
        )

    def begin(self, problem: Problem, sample: int) -> Episode:
        return _Programs(self)

    def close(self) -> None:
        self.provider.close()


class _Programs(Episode):
    def __init__(self, environment: PythonBlocks) -> None:
        self._own = environment

    def respond(self, turn: Turn) -> Observation | End:
        calls = self._own.turn_format.calls(turn.text)
        if not calls:
            return End()
        # A turn has one call, so earlier ones are known without a record of them.
        if turn.number >= self._own.max_calls:
            said = f"refused: {self._own.max_calls} calls were made, and no more are allowed"
            return Observation((ToolResult(calls[0].name, said, "refused"),))
        return Observation(tuple(self._run(call) for call in calls))

    def _run(self, call: ToolCall) -> ToolResult:
        program = Program("python", call.arguments["code"])
        try:
            with self._own.provider.prepare(program, self._own.limits) as prepared:
                found = prepared.run()
        except ProviderError as error:
            raise InfrastructureError(str(error)) from error
        status = _STATUSES.get(found.status, "error")
        return ToolResult(call.name, _shown(found), status, found.seconds)


def _shown(found: Execution) -> str:
    """What the model reads: the output, then why there is no more of it."""
    if found.status == "ok":
        return found.stdout
    if found.status == "runtime_error":
        said = found.stderr.strip() or f"the program ended with exit code {found.exit_code}"
    else:
        said = f"the program was ended: {found.status}"
    return f"{found.stdout}\n{said}" if found.stdout else said
