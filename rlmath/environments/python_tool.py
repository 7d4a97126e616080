"""The Python tool: code that the model wrote, run in the project's sandbox.

Like in a notebook, the value of a final expression is printed unless it is ``None``.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlmath.environments.base import CallStatus, InfrastructureError, ToolResult
from rlmath.environments.text import cut_bytes, join_ends
from rlmath.environments.tools import Tool, ToolSession
from rlmath.errors import ConfigError
from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox import CodeProvider, Execution, Limits, Program, ProviderError
from rlmath.rewards.sandbox.cell import ERROR, MEMORY, OK
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rewards.sandbox.warm import PRELOAD, CellResult, Sandbox, WarmSandboxes

log = logging.getLogger(__name__)
T = TypeVar("T")

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Returns what it prints and its final expression's value.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code."}},
            "required": ["code"],
        },
    },
}
_CELL = Path(__file__).parents[1] / "rewards" / "sandbox" / "cell.py"
_MOST_CODE = 2**18


class PythonTool(Tool):
    """Runs code in warm sandboxes of this machine, or with a remote provider.

    Warm sandboxes need the local provider at level ``namespace``. Without them each call starts a
    sandbox, which takes a tenth of a second or a request. Raises ConfigError: ``session`` without
    warm sandboxes.

    Args:
        provider: Runs the code.
        limits: Limits of each call. A call with more output than ``output_kib`` is ended.
        output_bytes: Most bytes of a call's output; the middle of a longer one is left out.
        session: Keep the names of a sample's earlier calls, each of which has its own limits.
        ahead: Warm sandboxes that are kept ready.
        most: Most warm sandboxes at a time. With more sessions, those that were not used for
            longest lose theirs; their next call first repeats the earlier ones.
        preload: Packages that warm sandboxes import ahead, if they are installed.
        retries: Further attempts if a sandbox fails.
    """

    name = "python"
    schema = _SCHEMA

    def __init__(
        self,
        provider: CodeProvider,
        limits: Limits,
        *,
        output_bytes: int = 8192,
        session: bool = False,
        ahead: int = 4,
        most: int = 256,
        preload: tuple[str, ...] = PRELOAD,
        retries: int = 2,
    ) -> None:
        self._provider, self._limits, self._output_bytes = provider, limits, output_bytes
        self._retries = retries
        self.has_state = session
        self.pool: WarmSandboxes | None = None
        reason = "the provider is not the local one"
        if isinstance(provider, LocalProvider):
            try:
                self.pool = WarmSandboxes(
                    provider,
                    limits,
                    output_bytes=output_bytes,
                    ahead=ahead,
                    most=most,
                    preload=preload,
                )
                self._owners = _Owners(self.pool, most)
                with self.pool.one():  # one that works
                    return
            except (ProviderError, RewardSettingError) as error:
                reason = str(error)
                if self.pool is not None:
                    self.pool.close()
                self.pool = None
                log.warning("Each call of the Python tool starts a sandbox: %s", reason)
        if session:
            raise ConfigError(
                f"rollout.python_session=true needs warm sandboxes ({reason}); use "
                "rollout.python_session=false"
            )

    def begin(self) -> ToolSession:
        return _Kept(self, self._owners) if self.has_state else _Stateless(self)

    def run(self, code: str) -> ToolResult:
        """Run code in a new session."""
        if self.pool is None:
            return self._run_cold(code)
        pool = self.pool

        def attempt() -> CellResult:
            with pool.one() as sandbox:
                return sandbox.run(code)

        return self.result(self.retry(attempt))

    def retry(self, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` until it raises no ProviderError. Raises InfrastructureError: all
        attempts failed."""
        for left in range(self._retries, -1, -1):
            try:
                return attempt()
            except ProviderError as error:
                if left == 0:
                    raise InfrastructureError(f"python: {error}") from error
        raise AssertionError

    def result(self, found: CellResult) -> ToolResult:
        """The result of a call in a warm sandbox."""
        text = join_ends(found.head, found.tail, found.total)
        return self._result(found.status, text, found.exit_code, found.seconds)

    def _run_cold(self, code: str) -> ToolResult:
        source, file = _CELL.read_text(encoding="utf-8"), "code_of_the_model.py"
        program = Program("python", source, (file,), {file: code})

        def attempt() -> Execution:
            with self._provider.prepare(program, self._limits) as prepared:
                return prepared.run()

        found = self.retry(attempt)
        output = (found.stdout + found.stderr).encode("utf-8", "replace")
        status = {"runtime_error": "error", "output_limit": "flood", "disk_limit": "error"}.get(
            found.status, found.status
        )
        exit_code = found.exit_code or 0
        if status == "error" and exit_code == MEMORY:
            status = "memory"
        return self._result(status, cut_bytes(output, self._output_bytes), exit_code, found.seconds)

    def _result(self, said: str, text: str, exit_code: int, seconds: float) -> ToolResult:
        status: CallStatus = "error"
        limits, note = self._limits, ""
        if said == "timeout":
            status, note = "timeout", f"Stopped: the code ran for more than {limits.wall_s:g} s."
        elif said == "memory":
            status = "memory"
            note = f"Stopped: the code needed more than {limits.memory_mib} MiB of memory."
        elif said == "flood":
            note = f"Stopped: the code printed more than {limits.output_kib} KiB."
        elif said == "ok":
            status = "ok"
        elif exit_code < 0:
            note = f"The process was ended by {signal.Signals(-exit_code).name}."
        elif exit_code not in (OK, ERROR):
            note = f"The process ended with exit code {exit_code}."
        glue = "\n" if note and text and not text.endswith("\n") else ""
        return ToolResult(self.name, f"{text}{glue}{note}", status, seconds)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self._provider.close()


def _code_of(arguments: Mapping[str, Any]) -> str | ToolResult:
    code = arguments.get("code")
    if not isinstance(code, str) or len(arguments) > 1:
        text = "The tool python takes one argument: code, a text."
        return ToolResult("python", text, "error")
    if len(code) > _MOST_CODE:
        return ToolResult("python", f"The code is longer than {_MOST_CODE} characters.", "refused")
    return code


class _Stateless(ToolSession):
    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        code = _code_of(arguments)
        return self._tool.run(code) if isinstance(code, str) else code


class _Kept(ToolSession):
    """A sample's session: the names of its calls stay in a sandbox, until another session needs
    that or it is lost. Then the next call first repeats the earlier ones in another sandbox."""

    def __init__(self, tool: PythonTool, owners: _Owners) -> None:
        self._tool, self._owners = tool, owners
        self._cells: list[str] = []
        self.is_closed = False

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        code = _code_of(arguments)
        if not isinstance(code, str):
            return code
        found, is_kept = self._tool.retry(lambda: self._run(code))
        result = self._tool.result(found)
        had_names = bool(self._cells)
        if is_kept:
            self._cells.append(code)
            return result
        self._cells.clear()
        if not had_names:
            return result
        note = "\nThe session has ended: what earlier code defined is lost."
        return replace(result, text=result.text + note)

    def _run(self, code: str) -> tuple[CellResult, bool]:
        """The result, and whether the names are kept."""
        sandbox = self._owners.acquire(self)
        try:
            for cell in () if sandbox.has_names else self._cells:
                sandbox.run(cell, keep=True)
                if not sandbox.has_names:
                    raise ProviderError("a session's earlier calls ended differently this time")
            return sandbox.run(code, keep=True), sandbox.has_names
        finally:
            self._owners.release(self, sandbox)

    def close(self) -> None:
        self.is_closed = True
        self._owners.drop(self)


class _Owners:
    """The sandboxes of sessions. Thread-safe. ``most``: most sandboxes that sessions have."""

    def __init__(self, pool: WarmSandboxes, most: int) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._in_call: dict[_Kept, Sandbox | None] = {}
        self._between_calls: dict[_Kept, Sandbox] = {}  # the one used last comes last

    def acquire(self, session: _Kept) -> Sandbox:
        """A session's sandbox for a call, or one without names if it has none. Raises
        ProviderError: none can be started, or the session is closed."""
        taken = None
        with self._lock:
            if session.is_closed:  # Between two calls of a turn.
                raise ProviderError("the session was closed")
            own = self._between_calls.pop(session, None)
            others = self._between_calls
            if own is None and others and len(self._in_call) + len(others) >= self._most:
                taken = others.pop(next(iter(others)))
            self._in_call[session] = own
        if taken is not None:
            self._pool.give_back(taken)
        if own is not None:
            return own
        try:
            found = self._pool.take()
        except ProviderError:
            self.drop(session)
            raise
        with self._lock:
            if session in self._in_call:
                self._in_call[session] = found
                return found
        self._pool.give_back(found)
        raise ProviderError("the session was closed")

    def release(self, session: _Kept, sandbox: Sandbox) -> None:
        """End a call: the sandbox stays the session's, unless its names are lost or others wait."""
        with self._lock:
            is_open = session in self._in_call
            waits = len(self._in_call) + len(self._between_calls) > self._most
            self._in_call.pop(session, None)
            if is_open and sandbox.has_names and not waits:
                self._between_calls[session] = sandbox
                return
        self._pool.give_back(sandbox)

    def drop(self, session: _Kept) -> None:
        """End a session; a call that is running fails."""
        with self._lock:
            idle, used = self._between_calls.pop(session, None), self._in_call.pop(session, None)
        if idle is not None:
            self._pool.give_back(idle)
        if used is not None:
            used.close()
