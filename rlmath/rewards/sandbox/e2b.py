"""Programs in E2B's cloud sandboxes. Needs the package ``e2b-code-interpreter`` and an account."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox.cloud_script import build_script, read_reply, total_limit_s
from rlmath.rewards.sandbox.provider import (
    CodeProvider,
    Execution,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
)


class E2BProvider(CodeProvider):
    """One E2B sandbox per program.

    Args:
        api_key: ``None`` reads ``E2B_API_KEY``.
        template: Sandbox template; ``None``: E2B's own.

    Raises:
        RewardSettingError: The package or the key is missing.
    """

    def __init__(
        self, max_parallel: int = 2, api_key: str | None = None, template: str | None = None
    ) -> None:
        try:
            self._sdk: Any = importlib.import_module("e2b_code_interpreter")
        except ImportError as error:
            raise RewardSettingError(
                "the code provider e2b needs the package e2b-code-interpreter "
                "(pip install e2b-code-interpreter); the provider local needs none"
            ) from error
        self._api_key = api_key or os.environ.get("E2B_API_KEY")
        if not self._api_key:
            raise RewardSettingError(
                "the code provider e2b needs an API key: set E2B_API_KEY or "
                "provider_settings.api_key"
            )
        self._template = template
        self.max_parallel = max_parallel
        self._slots = threading.BoundedSemaphore(max_parallel)

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        build_script(program, limits, "", {})  # fail on an unknown language before renting
        return _E2BProgram(self, program, limits)

    def run_python(self, script: str, timeout_s: float) -> str:
        settings = {"api_key": self._api_key, "timeout": int(timeout_s) + 30}
        if self._template is not None:
            settings["template"] = self._template
        with self._slots:
            sandbox = None
            try:
                sandbox = self._sdk.Sandbox.create(**settings)
                done = sandbox.run_code(script, timeout=timeout_s)
                return "".join(done.logs.stdout)
            except Exception as error:  # the SDK's exception classes are not stable
                raise ProviderError(f"e2b: {type(error).__name__}: {error}") from error
            finally:
                if sandbox is not None:
                    with suppress(Exception):
                        sandbox.kill()


class _E2BProgram(PreparedProgram):
    def __init__(self, provider: E2BProvider, program: Program, limits: Limits) -> None:
        self._provider = provider
        self._program = program
        self._limits = limits

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        script, mark = build_script(self._program, self._limits, stdin, files or {})
        printed = self._provider.run_python(script, total_limit_s(self._limits))
        result, self.compile_error = read_reply(printed, mark, self._limits)
        return result
