"""Tasks of NeMo-Gym: its resources server, which runs already, grades a response of one turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from rlmath.config.environments import ENVIRONMENTS
from rlmath.environments.adapters.opening import server_at
from rlmath.utils.setting import Options, setting

_TIMEOUT_S = 600.0  # rollout.call_timeout_s comes first


@dataclass(frozen=True)
class NeMoGymOptions(Options):
    url: str = setting("", "Address of the resources server, as http://127.0.0.1:8000.")


@ENVIRONMENTS.register("nemo_gym", NeMoGymOptions)
class NeMoGym:
    """A task; the server gets its row and the response."""

    def __init__(self, options: NeMoGymOptions) -> None:
        server_at(options.url)
        # It keeps the cookie of the server's session. Reading certificates takes milliseconds, for
        # each sample.
        has_tls = options.url.startswith("https")
        self._server = httpx.Client(
            base_url=options.url, timeout=_TIMEOUT_S, trust_env=False, verify=has_tls
        )
        self._row: dict[str, Any] = {}

    def reset(self, **row: Any) -> None:
        asked = row.get("responses_create_params")
        if not isinstance(asked, dict):
            raise ValueError(
                "the row has no responses_create_params, as a NeMo-Gym data set has; it has: "
                f"{', '.join(row)}"
            )
        if asked.get("tools"):
            raise ValueError(
                "the row lists tools (responses_create_params.tools), and those of a run are the "
                "same for each row; use tasks without, or write a class whose methods call the "
                "server (docs/tools.md)"
            )
        self._row = row
        self._post("seed_session", row)

    def step(self, text: str) -> tuple[str, float, bool]:
        said = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "id": "msg_0", "role": "assistant", "content": [said]}
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": time.time(),
            "model": "rlmath",
            "status": "completed",
            "output": [message | {"status": "completed"}],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
        found = self._post("verify", self._row | {"response": response})
        if found.get("mask_sample"):
            raise RuntimeError(
                f"the server could not grade: {found.get('failure_reason') or 'it says no reason'}"
            )
        return "", float(found["reward"]), True

    def close(self) -> None:
        self._server.close()

    def _post(self, place: str, body: Any) -> Any:
        reply = self._server.post(place, json=body)
        if reply.is_error:  # The address may have a password.
            raise RuntimeError(f"the server: {place}: {reply.status_code}: {reply.text[:500]}")
        return reply.json()
