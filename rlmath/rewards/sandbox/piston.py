"""Programs on a Piston server (github.com/engineer-man/piston, API version 2).

POST <endpoint>/execute
{"language", "version", "files": [{"name", "content"}], "stdin", "args", "run_timeout", ...}
-> {"run": {"stdout", "stderr", "code", "signal"}, "compile": {...}}, or {"message": "..."}
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.http_json import CallFailed, Endpoint, post_json
from rlmath.rewards.sandbox.provider import (
    LANGUAGES,
    CodeProvider,
    Execution,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
    Status,
    canonical_language,
)

_COMPILE_TIMEOUT_S = 60


class PistonProvider(CodeProvider):
    """Runs programs on one or more Piston servers.

    Args:
        endpoints: Addresses like ``http://host:2000/api/v2``, as a list or separated by commas.
            ``None`` reads the environment variable ``PISTON_ENDPOINTS``.
        max_requests_per_endpoint: Maximum number of concurrent requests per server.
        retries: Additional attempts after the first, each on the next server.
        backoff_s: Pause before the first retry, in seconds; it doubles each time.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | None = None,
        max_requests_per_endpoint: int = 1,
        retries: int = 4,
        backoff_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        given = endpoints if endpoints is not None else os.environ.get("PISTON_ENDPOINTS", "")
        addresses = given.split(",") if isinstance(given, str) else list(given)
        addresses = [a.strip() for a in addresses if a.strip()]
        if not addresses:
            raise RewardSettingError(
                "piston: no endpoints; set provider_settings.endpoints or PISTON_ENDPOINTS to "
                "addresses like http://host:2000/api/v2"
            )
        try:
            self._endpoints = [Endpoint.parse(a.rstrip("/") + "/execute") for a in addresses]
        except ValueError as error:
            raise RewardSettingError(f"piston: {error}") from error
        self.max_parallel = max_requests_per_endpoint * len(self._endpoints)
        self._slots = threading.BoundedSemaphore(self.max_parallel)
        self._turn = itertools.count()
        self._retries = retries
        self._backoff_s = backoff_s
        self._headers = dict(headers or {})
        self._versions = dict(versions or {})

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        if program.collect:
            raise ProviderError("piston returns no files; it cannot run a problem with file output")
        name = canonical_language(program.language)
        runtime = "c++" if name == "cpp" else name if name in LANGUAGES else program.language
        main = LANGUAGES[name].file if name in LANGUAGES else "main"
        files = {main: program.source, **program.files}
        return self.prepare_files(runtime, files, limits, args=program.args)

    def prepare_files(
        self, runtime: str, files: Mapping[str, str], limits: Limits, args: tuple[str, ...] = ()
    ) -> PreparedProgram:
        """Files for a runtime, by its name on the server; the first is the main file."""
        return _PistonProgram(self, runtime, files, limits, args)

    def execute(self, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Send one request, with retries. Raises ProviderError: every attempt failed."""
        pause_s = self._backoff_s
        with self._slots:
            for attempt in itertools.count():
                endpoint = self._endpoints[next(self._turn) % len(self._endpoints)]
                try:
                    reply = post_json(endpoint, body, timeout_s=timeout_s, headers=self._headers)
                    return _check_reply(endpoint, reply)
                except CallFailed as error:
                    if attempt >= self._retries or not error.retry:
                        raise ProviderError(f"piston: {error}") from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 10.0)
        raise ProviderError("piston: no attempt was made")

    def version(self, runtime: str) -> str:
        return self._versions.get(runtime, "*")


def _check_reply(endpoint: Endpoint, reply: Any) -> Mapping[str, Any]:
    if not isinstance(reply, Mapping):
        raise CallFailed(f"{endpoint.url}: the reply is no JSON object")
    if "message" in reply:
        raise CallFailed(f"{endpoint.url}: {reply['message']}", retry=False)
    run, compiled = reply.get("run"), reply.get("compile")
    if compiled is None or compiled.get("code") == 0:
        if not isinstance(run, Mapping):
            raise CallFailed(f"{endpoint.url}: the reply has no 'run'")
        if "Resource temporarily unavailable" in str(run.get("stderr")):
            raise CallFailed(f"{endpoint.url}: the server is out of processes")
    return reply


@dataclass
class _PistonProgram(PreparedProgram):
    """A program on Piston, which compiles in each run, so the first run has a compile error."""

    provider: PistonProvider
    runtime: str
    files: Mapping[str, str]
    limits: Limits
    args: tuple[str, ...]

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        limits = self.limits
        content = {**self.files, **(files or {})}
        body = {
            "language": self.runtime,
            "version": self.provider.version(self.runtime),
            "files": [{"name": name, "content": text} for name, text in content.items()],
            "stdin": stdin,
            "args": list(self.args),
            "compile_timeout": _COMPILE_TIMEOUT_S * 1000,
            "run_timeout": round(limits.wall_s * 1000),
            "run_memory_limit": limits.memory_mib * 2**20,
        }
        begun = time.monotonic()
        reply = self.provider.execute(body, limits.wall_s + _COMPILE_TIMEOUT_S + 30.0)
        seconds = time.monotonic() - begun
        compiled = reply.get("compile")
        if isinstance(compiled, Mapping) and compiled.get("code") not in (0, None):
            self.compile_error = str(compiled.get("stderr") or compiled.get("output") or "")
            return Execution("runtime_error", stderr=self.compile_error, seconds=seconds)
        return _execution(reply["run"], seconds, limits.wall_s)


def _execution(run: Mapping[str, Any], seconds: float, wall_s: float) -> Execution:
    code, signal = run.get("code"), run.get("signal")
    status: Status = "ok" if code == 0 and not signal else "runtime_error"
    said = str(run.get("status") or "")
    if said in ("TO", "OL", "EL"):
        status = "timeout" if said == "TO" else "output_limit"
    elif signal == "SIGKILL":
        # No reason given: a run that used up its time was cut, a shorter one ran out of memory.
        status = "timeout" if seconds >= wall_s else "memory"
    return Execution(
        status=status,
        stdout=str(run.get("stdout") or ""),
        stderr=str(run.get("stderr") or ""),
        exit_code=code if isinstance(code, int) else None,
        seconds=seconds,
    )
