"""Tools, and the environment that calls those that a turn asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.environments.base import (
    End,
    Environment,
    Episode,
    Observation,
    ToolCall,
    ToolResult,
    Turn,
    TurnFormat,
)
from rlmath.types import Problem


class ToolSession(ABC):
    """One sample's use of a tool."""

    @abstractmethod
    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool; may take seconds. Raises InfrastructureError: nothing is known about the
        call, after retries."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release resources of the sample."""


class Tool(ABC):
    """A tool. Thread-safe."""

    name: str
    schema: Mapping[str, Any]  # Name, description and parameters, as chat templates take them.
    has_state: bool = False  # Whether a result depends on the sample's earlier calls.

    @abstractmethod
    def begin(self) -> ToolSession:
        """A sample's use of the tool."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything."""


class ToolEnvironment(Environment):
    """Calls the tools that a turn asks for; a turn without calls is the end. ``turn_format``: reads
    the calls of a turn. ``max_calls``: calls of a sample; further ones are refused."""

    def __init__(self, turn_format: TurnFormat, tools: Sequence[Tool], max_calls: int) -> None:
        self._format, self._tools, self._max_calls = turn_format, tuple(tools), max_calls
        self.has_state = any(tool.has_state for tool in tools)

    def begin(self, problem: Problem, sample: int) -> Episode:
        sessions = {tool.name: tool.begin() for tool in self._tools}
        return ToolEpisode(self._format, sessions, self._max_calls)

    def close(self) -> None:
        for tool in self._tools:
            tool.close()


class ToolEpisode(Episode):
    """A sample's calls of tools."""

    def __init__(
        self, turn_format: TurnFormat, sessions: Mapping[str, ToolSession], max_calls: int
    ) -> None:
        self._format, self._sessions, self._max_calls = turn_format, sessions, max_calls
        self._made = 0  # calls, so far

    def respond(self, turn: Turn) -> Observation | End:
        made = max(self._made, turn.calls_before)
        try:
            calls = self._format.calls(turn.text)
        except ValueError as error:
            self._made = made + 1
            return Observation((ToolResult("", str(error), "error"),))
        if calls is None:
            return self.answer(turn)
        self._made = made + len(calls)
        left = self._max_calls - made
        return Observation(tuple(self._call(call, i < left) for i, call in enumerate(calls)))

    def answer(self, turn: Turn) -> Observation | End:
        """Answer a turn without calls."""
        return End(self.reward())

    def _call(self, call: ToolCall, is_allowed: bool) -> ToolResult:
        session = self._sessions.get(call.name)
        if not is_allowed:
            text = f"Refused: there were {self._max_calls} calls, and no more are allowed."
            return ToolResult(call.name, text, "refused")
        if session is None:
            names = ", ".join(self._sessions)
            text = f"There is no tool {call.name!r}. The tools are: {names}."
            return ToolResult(call.name, text, "error")
        return session.call(call.arguments)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
