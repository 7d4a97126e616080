"""The Python tool: code that the model wrote, run in the project's sandbox.

Like in a notebook, the value of a final expression is printed unless it is ``None``.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rlmath.environments.base import CallStatus, ToolResult
from rlmath.environments.text import cut_bytes
from rlmath.environments.tools import Tool, ToolSession
from rlmath.errors import ConfigError
from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox import CodeProvider, Limits, Program, ProviderError
from rlmath.rewards.sandbox.cell import ERROR, MEMORY, OK
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rewards.sandbox.warm import CellResult, Sandbox, WarmSandboxes

log = logging.getLogger(__name__)

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
# Statuses of a program's run that have other names for a cell's.
_STATUSES = {"runtime_error": "error", "output_limit": "flood", "disk_limit": "error"}


class PythonTool(Tool):
    """Runs code in warm sandboxes of this machine, or with a remote provider.

    Warm sandboxes need the local provider at level ``namespace``. Without them each call starts a
    sandbox, which takes a tenth of a second or a request. Raises ConfigError: ``session`` without
    warm sandboxes.

    Args:
        limits: Limits of each call. A call with more output than ``output_kib`` is ended.
        output_bytes: Most bytes of a call's output; the middle of a longer one is left out.
        session: Keep the names of a sample's earlier calls, each of which has its own limits.
        ahead: Warm sandboxes that are kept ready.
        most: Most warm sandboxes at a time. With more sessions, those that were not used for
            longest lose theirs; their next call first repeats the earlier ones.
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
    ) -> None:
        self._provider, self._limits, self._output_bytes = provider, limits, output_bytes
        self.has_state = session
        self.pool: WarmSandboxes | None = None
        reason = "the provider is not the local one"
        if isinstance(provider, LocalProvider):
            try:
                self.pool = WarmSandboxes(provider, limits, ahead=ahead, most=most)
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
        return _Session(self, self._owners if self.has_state else None)

    def run(self, code: str) -> ToolResult:
        """Run code in a new session. Raises ProviderError: nothing is known about it."""
        if self.pool is not None:
            with self.pool.one() as sandbox:
                return self.result(sandbox.run(code))
        source, file = _CELL.read_text(encoding="utf-8"), "code_of_the_model.py"
        program = Program("python", source, (file,), {file: code})
        with self._provider.prepare(program, self._limits) as prepared:
            found = prepared.run()
        exit_code, status = found.exit_code or 0, _STATUSES.get(found.status, found.status)
        if status == "error" and exit_code == MEMORY:
            status = "memory"
        output = (found.stdout + found.stderr).encode("utf-8", "replace")
        return self.result(CellResult(status, output, exit_code, found.seconds))

    def result(self, found: CellResult) -> ToolResult:
        limits, exit_code = self._limits, found.exit_code
        note = {
            "timeout": f"Stopped: the code ran for more than {limits.wall_s:g} s.",
            "memory": f"Stopped: the code needed more than {limits.memory_mib} MiB of memory.",
            "flood": f"Stopped: the code printed more than {limits.output_kib} KiB.",
        }.get(found.status, "")
        if found.status == "error" and exit_code < 0:
            note = f"The process was ended by {signal.Signals(-exit_code).name}."
        elif found.status == "error" and exit_code not in (OK, ERROR):
            note = f"The process ended with exit code {exit_code}."
        status = "error" if found.status == "flood" else cast(CallStatus, found.status)
        text = cut_bytes(found.output, self._output_bytes)
        glue = "\n" if note and text and not text.endswith("\n") else ""
        return ToolResult(self.name, f"{text}{glue}{note}", status, found.seconds)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self._provider.close()


class _Session(ToolSession):
    """A sample's calls. With ``owners``, the names of earlier calls stay in a sandbox until another
    session needs it or it is lost; then the next call first repeats them in another one."""

    def __init__(self, tool: PythonTool, owners: _Owners | None) -> None:
        self._tool, self._owners = tool, owners
        self._cells: list[str] = []
        self.sandbox: Sandbox | None = None  # During a call.
        self.is_closed = False

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) > 1:
            text = "The tool python takes one argument: code, a text."
            return ToolResult("python", text, "error")
        if len(code) > _MOST_CODE:
            text = f"The code is longer than {_MOST_CODE} characters."
            return ToolResult("python", text, "refused")
        if self._owners is None:
            return self._tool.run(code)
        with self._owners.sandbox_of(self) as sandbox:
            for cell in () if sandbox.has_names else self._cells:
                sandbox.run(cell, keep=True)
                if not sandbox.has_names:
                    raise ProviderError("a session's earlier calls ended differently this time")
            result = self._tool.result(sandbox.run(code, keep=True))
            if sandbox.has_names:
                self._cells.append(code)
            elif self._cells:
                self._cells.clear()
                note = "\nThe session has ended: what earlier code defined is lost."
                result = replace(result, text=result.text + note)
        return result

    def close(self) -> None:
        if self._owners is not None:
            self._owners.drop(self)


class _Owners:
    """The sandboxes of sessions. Thread-safe. ``most``: most sandboxes that sessions have."""

    def __init__(self, pool: WarmSandboxes, most: int) -> None:
        self._pool, self._most = pool, most
        self._lock = threading.Lock()
        self._calls = 0  # running
        self._between_calls: dict[_Session, Sandbox] = {}  # the one used last comes last

    @contextmanager
    def sandbox_of(self, session: _Session) -> Iterator[Sandbox]:
        """A session's sandbox for a call, or one without names if it has none. Raises
        ProviderError: none can be started, or the session is closed."""
        taken, others, keeps = None, self._between_calls, False
        with self._lock:
            sandbox = others.pop(session, None)
            if sandbox is None and others and self._calls + len(others) >= self._most:
                taken = others.pop(next(iter(others)))
            self._calls += 1
        try:
            if taken is not None:
                self._pool.give_back(taken)
            session.sandbox = sandbox = sandbox or self._pool.take()
            if session.is_closed:  # Between two calls of a turn, or meanwhile.
                raise ProviderError("the session was closed")
            yield sandbox
        finally:
            with self._lock:
                # It stays the session's, unless its names are lost or others wait.
                if sandbox is not None and sandbox.has_names and not session.is_closed:
                    keeps = self._calls + len(others) <= self._most
                if sandbox is not None and keeps:
                    others[session] = sandbox
                session.sandbox = None
                self._calls -= 1
            if sandbox is not None and not keeps:
                self._pool.give_back(sandbox)

    def drop(self, session: _Session) -> None:
        """End a session; a call that is running fails."""
        with self._lock:
            session.is_closed = True
            idle = self._between_calls.pop(session, None)
            if session.sandbox is not None:
                session.sandbox.close()
        if idle is not None:
            self._pool.give_back(idle)
