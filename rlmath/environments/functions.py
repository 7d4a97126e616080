"""A user's functions as tools, by TRL's interface: typed, thread-safe, sync or async, with a
Google-style docstring. Their schema is that of ``transformers.utils.get_json_schema``.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rlmath.environments.base import CallStatus, ToolResult
from rlmath.environments.text import cut_bytes
from rlmath.environments.tools import Tool, ToolSession
from rlmath.errors import ConfigError, InfrastructureError
from rlmath.rewards.event_loop import run_coroutine

# Threads of calls that have not returned; beyond it something is broken for good.
MOST_ABANDONED = 100


class CallLimits:
    """Limits of calls, and the number of calls that have not returned in time. Thread-safe.
    ``timeout_s``: time of a call. ``output_bytes``: most bytes of its result; the middle of a
    longer one is left out."""

    def __init__(self, timeout_s: float, output_bytes: int) -> None:
        self.timeout_s, self.output_bytes = timeout_s, output_bytes
        self.abandoned = 0
        self._lock = threading.Lock()

    def call(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a function in a thread, which is abandoned if it does not return in time. Raises
        TimeoutError: it did not return (an async one is cancelled); InfrastructureError: too many
        calls have not; BaseException: raised by the function."""
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
    """A function as a tool. ``setting``: where the user named it, for messages. Raises ConfigError:
    it has no types or no documentation."""

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

    def bind(self, instance: Any) -> ToolSession:
        found = copy.copy(self)
        found._function = getattr(instance, self.name)
        return found

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        begun = time.monotonic()
        status: CallStatus = "error"
        try:
            # The validator itself fails on arguments that are nested a thousand deep.
            wrong = next(self._check.iter_errors(dict(arguments)), None)
            if wrong is None:
                value = self._limits.call(self.name, self._function, arguments)
                text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
                status = "ok"
            else:
                where = wrong.json_path.removeprefix("$").removeprefix(".") or "arguments"
                text = f"{self.name}: {where}: {wrong.message}"
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


def _with_nullable(schema: Any) -> Any:
    """Replace ``nullable``, which JSON Schema does not have, by a type ``null``."""
    if isinstance(schema, list):
        return [_with_nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _with_nullable(one) for name, one in schema.items() if one is not True}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner
