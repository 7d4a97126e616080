"""Environments of OpenEnv: a server that runs already, which replies to turns.

Each sample has a connection, and so its own environment on the server. The messages are those of
OpenEnv's own client, which is not needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmath.config.environments import ENVIRONMENTS
from rlmath.environments.adapters.opening import field_of, server_at
from rlmath.utils.setting import Options, setting

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_MOST_BYTES = 2**24


@dataclass(frozen=True)
class OpenEnvOptions(Options):
    url: str = setting("", "Address of the server, as http://127.0.0.1:8000.")
    action_key: str = setting(
        "", "Field of the action that gets the turn; empty: the turn is the action, in JSON."
    )
    observation_key: str = setting(
        "", "Field of the observation that the model reads; empty: all of it, in JSON."
    )
    reset_keys: str = setting("", "Fields of the row that reset is given, separated by commas.")


@ENVIRONMENTS.register("openenv", OpenEnvOptions)
class OpenEnv:
    """An environment on a server; thoughts are no part of an action."""

    def __init__(self, options: OpenEnvOptions) -> None:
        scheme = "wss" if options.url.startswith("https") else "ws"
        self._address = f"{scheme}://{server_at(options.url)}/ws"
        self._options = options
        self._socket: ClientConnection | None = None
        self._is_closed = False

    def reset(self, **row: Any) -> str | None:
        from websockets.sync.client import connect

        names = [name.strip() for name in self._options.reset_keys.split(",") if name.strip()]
        given = {name: field_of(row, name, "reset_keys") for name in names}
        self._socket = connect(self._address, max_size=_MOST_BYTES, proxy=None).__enter__()
        if self._is_closed:  # Meanwhile: connecting took longer than a call may.
            self.close()
        found = self._exchange("reset", given)
        return self._text_of(found["observation"]) or None

    def step(self, text: str) -> tuple[str, float, bool]:
        text = text.rpartition("</think>")[2].strip()
        action: Any = {self._options.action_key: text}
        if not self._options.action_key:
            try:
                action = json.loads(text[text.index("{") : text.rindex("}") + 1], strict=False)
            except (ValueError, RecursionError) as error:
                return f"The action is not a valid JSON object: {error}.", 0.0, False
        try:
            found = self._exchange("step", action)
        except _InvalidAction as error:
            return f"The action is not valid: {error}", 0.0, False
        reward = float(found["reward"] or 0.0)
        return self._text_of(found["observation"]), reward, bool(found["done"])

    def close(self) -> None:
        """End it, also while another thread connects."""
        self._is_closed = True
        if self._socket is not None:
            self._socket.close()

    def _exchange(self, kind: str, data: Any) -> Any:
        assert self._socket is not None
        self._socket.send(json.dumps({"type": kind, "data": data}))
        message = json.loads(self._socket.recv())
        found = message["data"]
        if message["type"] != "error":
            return found
        if kind == "step" and found["code"] == "VALIDATION_ERROR":
            raise _InvalidAction("; ".join(_error_text(one) for one in found.get("errors", ())))
        raise RuntimeError(f"the server: {found['message']} ({found['code']})")

    def _text_of(self, observation: Any) -> str:
        key = self._options.observation_key
        if not key:
            shown = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(shown, ensure_ascii=False)
        return str(field_of(observation, key, "observation_key"))


class _InvalidAction(Exception):
    """The server does not accept the model's action; the message is for the model."""


def _error_text(error: Any) -> str:
    """One of pydantic's errors."""
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
