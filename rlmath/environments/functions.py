"""A user's functions and classes as tools and environments, by TRL's interface.

``rollout.tools``: typed, thread-safe functions with a Google-style docstring, sync or async. Their
schema is that of ``transformers.utils.get_json_schema``.

``rollout.environment``: a class whose public methods are tools, with ``reset(**row)`` and, if it
knows the reward, ``get_reward()``. Each sample has its own instance.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlmath.environments.base import (
    CallStatus,
    Environment,
    Episode,
    InfrastructureError,
    ToolResult,
    TurnFormat,
)
from rlmath.environments.text import cut_bytes
from rlmath.environments.tools import Tool, ToolEnvironment, ToolEpisode, ToolSession
from rlmath.errors import ConfigError
from rlmath.rewards.event_loop import run_coroutine
from rlmath.types import Problem

# Threads of calls that have not returned; beyond it something is broken for good.
MOST_ABANDONED = 100


class CallLimits:
    """Limits of calls, and the number of calls that have not returned in time. Thread-safe.

    Args:
        timeout_s: Time of a call.
        output_bytes: Most bytes of its result; the middle of a longer one is left out.
    """

    def __init__(self, timeout_s: float, output_bytes: int) -> None:
        self.timeout_s, self.output_bytes = timeout_s, output_bytes
        self.abandoned = 0
        self._lock = threading.Lock()

    def call(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function in a thread, which is abandoned if it does not return in time.

        Raises:
            TimeoutError: It did not return; an async one is cancelled.
            InfrastructureError: Too many calls have not returned.
            BaseException: Raised by the function.
        """
        if self.abandoned >= MOST_ABANDONED:
            raise InfrastructureError(f"{name}: {self.abandoned} calls have not returned")
        future: Future[Any] = Future()
        late = False

        def work() -> None:
            try:
                value = function(**arguments)
                if inspect.isawaitable(value):
                    value = run_coroutine(asyncio.wait_for(value, self.timeout_s))
                future.set_result(value)
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self.abandoned -= late

        threading.Thread(target=work, name=f"tool-{name}", daemon=True).start()
        try:
            return future.result(self.timeout_s)
        except TimeoutError:
            with self._lock:
                late = not future.done()
                self.abandoned += late
            raise


class FunctionTool(Tool, ToolSession):
    """A function as a tool.

    Args:
        setting: Where the user named it, for messages.
        function: Typed and documented.
        limits: Limits of its calls.

    Raises:
        ConfigError: It has no types or no documentation.
    """

    def __init__(self, setting: str, function: Callable[..., Any], limits: CallLimits) -> None:
        from transformers.utils import get_json_schema

        self._function, self._limits = function, limits
        try:
            self.schema = get_json_schema(function)
        except Exception as error:
            raise ConfigError(
                f"{setting}: {error}; a tool needs a type for each parameter and a docstring with "
                "an entry for each under 'Args:'"
            ) from error
        from jsonschema import Draft202012Validator

        self.name = self.schema["function"]["name"]
        parameters = _with_nullable(self.schema["function"]["parameters"])
        self._check = Draft202012Validator({**parameters, "additionalProperties": False})

    def begin(self) -> ToolSession:
        return self

    def bound_to(self, instance: Any) -> ToolSession:
        """The tool as a method of an instance."""
        return _Method(self, getattr(instance, self.name))

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return self.call_as(self._function, arguments)

    def call_as(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult:
        """Call a function that has this tool's schema."""
        begun = time.monotonic()
        status: CallStatus = "error"
        wrong = next(self._check.iter_errors(dict(arguments)), None)
        if wrong is not None:
            where = wrong.json_path.removeprefix("$").removeprefix(".") or "arguments"
            return ToolResult(self.name, f"{self.name}: {where}: {wrong.message}", status)
        try:
            value = self._limits.call(self.name, function, arguments)
            text, status = _text(value), "ok"
        except InfrastructureError:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            if (
                isinstance(error, TimeoutError)
                and time.monotonic() - begun >= self._limits.timeout_s
            ):
                text = f"{self.name} did not return within {self._limits.timeout_s:g} s."
                status = "timeout"
        seconds = time.monotonic() - begun
        cut = cut_bytes(text.encode("utf-8", "replace"), self._limits.output_bytes)
        return ToolResult(self.name, cut, status, seconds)


class _Method(ToolSession):
    def __init__(self, tool: FunctionTool, method: Callable[..., Any]) -> None:
        self._tool, self._method = tool, method

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return self._tool.call_as(self._method, arguments)


def _with_nullable(schema: Any) -> Any:
    """``nullable``, which JSON Schema does not know, in its own words."""
    if isinstance(schema, list):
        return [_with_nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _with_nullable(one) for name, one in schema.items() if one is not True}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class ClassEnvironment(Environment):
    """A user's class as an environment.

    Args:
        setting: Where the user named it, for messages.
        make: The class, or a function that makes an instance.
        turn_format: Reads the calls of a turn.
        tools: Further tools, beside the instance's methods.
        limits: Limits of calls of the instance.
        max_calls: As of :class:`ToolEnvironment`.

    Raises:
        ConfigError: It cannot be made, has no ``reset``, or a method is no tool.
    """

    def __init__(
        self,
        setting: str,
        make: Callable[[], Any],
        turn_format: TurnFormat,
        tools: Sequence[Tool],
        limits: CallLimits,
        max_calls: int,
    ) -> None:
        self._setting, self._make, self._format = setting, make, turn_format
        self._limits, self._max_calls = limits, max_calls
        try:
            probe = make()
        except Exception as error:
            raise ConfigError(
                f"{setting}: {type(error).__name__} while making it: {error}"
            ) from error
        if not callable(getattr(probe, "reset", None)):
            raise ConfigError(f"{setting}: {type(probe).__name__} has no method reset(**row)")
        self._methods = [
            FunctionTool(f"{setting}.{name}", getattr(probe, name), limits)
            for name, _ in inspect.getmembers(type(probe), inspect.isfunction)
            if not name.startswith("_") and name not in ("reset", "get_reward")
        ]
        self.tools: tuple[Tool, ...] = (*tools, *self._methods)
        self._shared = ToolEnvironment(turn_format, self.tools, max_calls)

    def begin(self, problem: Problem, sample: int) -> Episode:
        instance = self._own("making it", self._make, {})
        row = {"prompt": problem.messages or problem.prompt, **problem.columns}
        said = self._own("reset", instance.reset, _accepted(instance.reset, row))
        if said is not None:
            raise ConfigError(
                f"{self._setting}: reset returned {type(said).__name__}; prompts are tokenized "
                "before samples begin, so put the text into the data's rows and return None"
            )
        others = self.tools[: len(self.tools) - len(self._methods)]
        sessions = {tool.name: tool.begin() for tool in others}
        sessions |= {method.name: method.bound_to(instance) for method in self._methods}
        return _ClassEpisode(self, instance, self._format, sessions, self._max_calls)

    def reward(self, instance: Any) -> float | None:
        """The instance's reward; ``None`` if it gives none.

        Raises:
            InfrastructureError: It raised an error, or did not return.
        """
        if not callable(getattr(instance, "get_reward", None)):
            return None
        value = self._own("get_reward", instance.get_reward, {})
        return None if value is None else float(value)

    def _own(self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call what the model has nothing to do with."""
        try:
            return self._limits.call(f"{self._setting}: {what}", function, arguments)
        except BaseException as error:
            text = f"{self._setting}: {type(error).__name__} in {what}: {error}"
            raise InfrastructureError(text) from error

    def close(self) -> None:
        self._shared.close()


class _ClassEpisode(ToolEpisode):
    def __init__(self, environment: ClassEnvironment, instance: Any, *of_tools: Any) -> None:
        super().__init__(*of_tools)
        self._environment, self._instance = environment, instance

    def reward(self) -> float | None:
        return self._environment.reward(self._instance)


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's fields that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}
