"""Programs in MorphCloud's sandboxes. Needs the package ``morphcloud`` and an account."""

from __future__ import annotations

from contextlib import suppress

from rlmath.rewards.sandbox.cloud import CloudProvider


class MorphProvider(CloudProvider):
    """One MorphCloud sandbox per run. ``api_key``: ``None`` reads ``MORPH_API_KEY``."""

    def __init__(self, max_parallel: int = 2, api_key: str | None = None) -> None:
        modules = ["morphcloud.api", "morphcloud.sandbox"]
        super().__init__("morph", "morphcloud", modules, max_parallel, api_key)
        self._client = self.sdk[0].MorphCloudClient(api_key=self.api_key)

    def run_in_new_sandbox(self, script: str, timeout_s: float) -> str:
        new = self.sdk[1].Sandbox.new
        sandbox = new(client=self._client, ttl_seconds=int(timeout_s) + 30)
        try:
            done = sandbox.run_code(script, language="python", timeout=int(timeout_s))
            return str(getattr(done, "stdout", None) or getattr(done, "text", None) or "")
        finally:
            for end in (sandbox.close, sandbox.shutdown):
                with suppress(Exception):
                    end()
