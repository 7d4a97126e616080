"""Environments of skyrl-gym (``pip install skyrl-gym``), which reply to turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.config.environments import ENVIRONMENTS
from rlmath.environments.adapters.opening import added_text, field_of
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class SkyRLGymOptions(Options):
    id: str = setting("gsm8k", "The environment's id in skyrl_gym's registry.")
    prompt_key: str = setting("prompt", "Field of the row with the problem.")
    config: dict[str, Any] = setting(dict, "The environment's env_config.")


@ENVIRONMENTS.register("skyrl_gym", SkyRLGymOptions)
class SkyRLGym:
    """An environment with ``init`` and ``step``; it gets the row as ``extras``."""

    def __init__(self, options: SkyRLGymOptions) -> None:
        self._options = options
        self._env: Any = None

    def reset(self, **row: Any) -> str | None:
        import skyrl_gym

        options = self._options
        prompt = field_of(row, options.prompt_key, "prompt_key", str)
        self._env = skyrl_gym.make(options.id, env_config=options.config, extras=row)
        messages, _ = self._env.init([{"role": "user", "content": prompt}])
        if len(messages) != 1 or messages[0]["role"] != "user":
            raise ValueError("init returns another chat than the problem's one message")
        return added_text(prompt, str(messages[0]["content"]))

    def step(self, text: str) -> tuple[str, float, bool]:
        found = self._env.step(text)
        if found.get("postprocessed_action") not in (None, text):
            raise ValueError(
                "step rewrites what the model said (postprocessed_action), which would then be "
                "trained on tokens that it did not sample"
            )
        said = "\n".join(str(one["content"]) for one in found["observations"])
        return said, float(found["reward"]), bool(found["done"])

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
