"""Programs in E2B's cloud sandboxes. Needs the package ``e2b-code-interpreter`` and an account."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rlmath.rewards.sandbox.cloud import CloudProvider


class E2BProvider(CloudProvider):
    """One E2B sandbox per program. ``api_key``: ``None`` reads ``E2B_API_KEY``. ``template``:
    sandbox template; ``None``: E2B's own."""

    def __init__(
        self, max_parallel: int = 2, api_key: str | None = None, template: str | None = None
    ) -> None:
        modules = ["e2b_code_interpreter"]
        super().__init__("e2b", "e2b-code-interpreter", modules, max_parallel, api_key)
        self._settings: dict[str, Any] = {"api_key": self.api_key}
        if template is not None:
            self._settings["template"] = template

    def run_in_new_sandbox(self, script: str, timeout_s: float) -> str:
        (sdk,) = self.sdk
        sandbox = sdk.Sandbox.create(timeout=int(timeout_s) + 30, **self._settings)
        try:
            return "".join(sandbox.run_code(script, timeout=timeout_s).logs.stdout)
        finally:
            with suppress(Exception):
                sandbox.kill()
