"""Agents written for OpenRLHF: a class ``AgentInstance`` with ``reset`` and ``step``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rlmath.config.environments import ENVIRONMENTS, EnvironmentTraits
from rlmath.environments.adapters.opening import added_text, field_of
from rlmath.errors import ConfigError
from rlmath.plugins.loading import attribute_of, load
from rlmath.plugins.source import split
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class OpenRLHFOptions(Options):
    agent: str = setting("", "The class, as my_agent.py:AgentInstance.")
    prompt_key: str = setting("prompt", "Field of the row with the problem.")
    label_key: str = setting("answer", "Field of the row with the label.")


@ENVIRONMENTS.register("openrlhf", OpenRLHFOptions, EnvironmentTraits(("agent",)))
class OpenRLHFAgent:
    """An agent; feedback is a message to the model, so it needs no chat markers."""

    def __init__(self, options: OpenRLHFOptions) -> None:
        place, name = split(options.agent)
        if not name:
            raise ConfigError(
                "rollout.environment_options.agent: name a class, my.py:AgentInstance"
            )
        self._options, self._agent = options, attribute_of(load(place), name)()
        self._said = ""
        self._label: Any = None

    async def reset(self, **row: Any) -> str | None:
        self._label = field_of(row, self._options.label_key, "label_key")
        prompt = field_of(row, self._options.prompt_key, "prompt_key", str)
        states = {"observation": prompt, "label": self._label}
        found = await _await_value(self._agent.reset(states))
        self._said = str(found["observation"])
        return added_text(prompt, self._said)

    async def step(self, text: str) -> tuple[str, float, bool]:
        states = {
            "observation_text": self._said,
            "action_text": text,
            "label": self._label,
            "sampling_params": None,
        }
        found = await _await_value(self._agent.step(states))
        for name in ("sampling_params", "environment_images"):
            if found.get(name):
                raise ValueError(f"step returns {name}, which rlmath does not change between turns")
        said = str(found["environment_feedback"])
        self._said += text + said
        return said, float(found["rewards"]), bool(found["done"])


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
