"""Programs in MorphCloud's sandboxes. Needs the package ``morphcloud`` and an account."""

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


class MorphProvider(CodeProvider):
    """One MorphCloud sandbox per run.

    Args:
        api_key: ``None`` reads ``MORPH_API_KEY``.

    Raises:
        RewardSettingError: The package or the key is missing.
    """

    def __init__(self, max_parallel: int = 2, api_key: str | None = None) -> None:
        try:
            self._api: Any = importlib.import_module("morphcloud.api")
            self._sdk: Any = importlib.import_module("morphcloud.sandbox")
        except ImportError as error:
            raise RewardSettingError(
                "the code provider morph needs the package morphcloud "
                "(pip install morphcloud); the provider local needs none"
            ) from error
        key = api_key or os.environ.get("MORPH_API_KEY")
        if not key:
            raise RewardSettingError(
                "the code provider morph needs an API key: set MORPH_API_KEY or "
                "provider_settings.api_key"
            )
        self._client = self._api.MorphCloudClient(api_key=key)
        self.max_parallel = max_parallel
        self._slots = threading.BoundedSemaphore(max_parallel)

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        build_script(program, limits, "", {})  # fail on an unknown language before renting
        return _MorphProgram(self, program, limits)

    def run_python(self, script: str, timeout_s: float) -> str:
        with self._slots:
            sandbox = None
            try:
                sandbox = self._sdk.Sandbox.new(
                    client=self._client, ttl_seconds=int(timeout_s) + 30
                )
                done = sandbox.run_code(script, language="python", timeout=int(timeout_s))
                return str(getattr(done, "stdout", None) or getattr(done, "text", None) or "")
            except Exception as error:  # the SDK's exception classes are not stable
                raise ProviderError(f"morph: {type(error).__name__}: {error}") from error
            finally:
                if sandbox is not None:
                    for end in (sandbox.close, sandbox.shutdown):
                        with suppress(Exception):
                            end()


class _MorphProgram(PreparedProgram):
    def __init__(self, provider: MorphProvider, program: Program, limits: Limits) -> None:
        self._provider = provider
        self._program = program
        self._limits = limits

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        script, mark = build_script(self._program, self._limits, stdin, files or {})
        printed = self._provider.run_python(script, total_limit_s(self._limits))
        result, self.compile_error = read_reply(printed, mark, self._limits)
        return result
