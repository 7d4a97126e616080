"""Checks of ``rollout.tools`` and ``rollout.environment``."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.benchmarks import HELD_OUT, benchmarks_of
from rlmath.config.environments import ENVIRONMENTS, PYTHON, TOOLS
from rlmath.config.rollout import ToolFormat, has_turns
from rlmath.config.schema import Config, RolloutConfig
from rlmath.environments.call_parsers import PARSERS
from rlmath.environments.chosen import Chosen
from rlmath.errors import ConfigError
from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox import get_provider


def tool_problems(config: Config) -> Iterator[str]:
    """Tools and an environment that do not exist, cannot be used, or are there twice, and a reward
    that nothing gives or reads."""
    rollout, gives_reward = config.rollout, False
    yield from _provider_problems(rollout)
    problems = [one for name in rollout.tools for one in _problems(name)]
    yield from problems
    yield from _without_template(config)
    if (name := rollout.tool_parser) is not None and name not in PARSERS:
        from rlmath.engines.tool_parsers import find_vllm_tool_parser

        try:
            find_vllm_tool_parser(name)
        except ConfigError as error:
            yield str(error)
    if problems or (rollout.environment is not None and not ENVIRONMENTS.has(rollout.environment)):
        return
    if has_turns(rollout):
        try:
            made_of = Chosen(rollout).made_of
        except ConfigError as error:
            yield str(error)
            return
        gives_reward = made_of is not None and made_of.gives_reward
    reads_reward = any(item.name == "environment" for item in config.reward.items)
    if gives_reward and not reads_reward:
        yield (
            f"rollout.environment={rollout.environment}: gives a reward that nothing reads; add "
            "{name: environment} to reward.items"
        )
    if reads_reward and not gives_reward:
        why = "which has no get_reward" if rollout.environment else "which is null"
        yield f"reward.items: environment is the reward of rollout.environment, {why}"


def _provider_problems(rollout: RolloutConfig) -> Iterator[str]:
    """A provider that cannot be made or keeps no names; the local one is made by the run."""
    name = rollout.python_provider
    if PYTHON not in rollout.tools or name == "local":
        return
    if rollout.python_session:
        yield f"rollout.python_session=true: python_provider={name} keeps no names; use local"
    try:
        get_provider(name, **rollout.python_provider_settings).close()
    except RewardSettingError as error:
        yield f"rollout.python_provider={name}: {error}"


def _without_template(config: Config) -> Iterator[str]:
    """Prompts that are no chats, while calls are."""
    if not has_turns(config.rollout) or config.rollout.tool_format is ToolFormat.fenced:
        return
    keys = ["data"] if config.data.apply_chat_template is False else []
    keys += [
        one.key
        for one in benchmarks_of(config)
        if one.name != HELD_OUT and one.tools and one.data.apply_chat_template is False
    ]
    for key in dict.fromkeys(keys):
        yield (
            f"{key}.apply_chat_template=false: rollout.tool_format=chat is the chat "
            "template's; apply it, or use rollout.tool_format=fenced"
        )


def _problems(name: str) -> list[str]:
    if name == PYTHON or TOOLS.has(name):
        return []
    if ":" in name:
        return TOOLS.problems(name)
    return [
        f"rollout.tools={name}: there is no such tool; there are {PYTHON} and your own functions, "
        "as my_module:function or file.py:function"
    ]
