"""The tools and the environment that the settings name, and the format of their calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmath.config.environments import PYTHON, TOOLS, maker_of
from rlmath.config.rollout import ToolFormat, has_turns
from rlmath.config.schema import Config, RolloutConfig
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import EnvironmentTokenizer, load_tokenizer
from rlmath.environments.base import Environment, ToolCall, TurnFormat
from rlmath.environments.call_parsers import PARSERS, Parser, arguments_in
from rlmath.environments.chat_format import ChatFormat
from rlmath.environments.classes import ClassEnvironment, UserClass
from rlmath.environments.fenced import Fenced
from rlmath.environments.functions import CallLimits, FunctionTool
from rlmath.environments.python_tool import PythonTool
from rlmath.environments.tools import Tool, ToolEnvironment
from rlmath.errors import ConfigError
from rlmath.model.chat import is_instruct
from rlmath.rewards.sandbox import Limits, get_provider

# Most bytes of an output per token, generous because a tool's result is still cut to tokens.
BYTES_PER_TOKEN = 16


class Chosen:
    """The tools and the environment that the settings name, at least one of them. Nothing of the
    sandbox is started. Raises ConfigError: one does not exist or cannot be used, or two tools have
    the same name."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        most_bytes = BYTES_PER_TOKEN * rollout.max_observation_tokens
        limits = CallLimits(rollout.call_timeout_s, most_bytes)
        self.made_of: UserClass | None = None  # None: there are tools alone.
        self._functions = {
            name: FunctionTool(f"rollout.tools={name}", TOOLS.get(name), limits)
            for name in rollout.tools
            if name != PYTHON
        }
        if (name := rollout.environment) is not None:
            make = maker_of(name, rollout.environment_options)
            self.made_of = UserClass(f"rollout.environment={name}", make, limits)
        methods = [] if self.made_of is None else self.made_of.methods
        # The environment's are the last ones.
        self.schemas: list[Mapping[str, Any]] = [
            PythonTool.schema if name == PYTHON else self._functions[name].schema
            for name in rollout.tools
        ] + [one.schema for one in methods]
        names = [str(one["function"]["name"]) for one in self.schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"rollout.tools: two tools are called {', '.join(twice)}")

    def format_of(self, config: Config, tokenizer: Any) -> TurnFormat:
        """The format of the calls. ``tokenizer``: the model's. Raises ConfigError: its chat
        template cannot be used."""
        rollout, data = self._rollout, config.data
        if rollout.tool_format is ToolFormat.fenced:
            return Fenced(tokenizer, self.schemas, rollout.max_observation_tokens)
        setting, fenced = "rollout.tool_format=chat", "use rollout.tool_format=fenced"
        if not data.apply_chat_template or not isinstance(tokenizer.chat_template, str):
            raise ConfigError(f"{setting}: needs data.apply_chat_template=true; or {fenced}")
        if not is_instruct(config.model.path):
            raise ConfigError(
                f"{setting}: {config.model.path} ends its turns with another token than its chat "
                f"template; name that as eos_token in tokenizer_config.json, or {fenced}"
            )
        try:
            return ChatFormat(
                tokenizer,
                tokenizer.chat_template,
                self.schemas,
                rollout.max_observation_tokens,
                replies=self.made_of is not None and self.made_of.replies,
                parser=self._parser(tokenizer),
                template_date=data.template_date,
                options=data.template_options,
            )
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from error

    def _parser(self, tokenizer: Any) -> str | Parser:
        name = self._rollout.tool_parser
        if name is None or name in PARSERS or not self.schemas:
            return name or "auto"
        from rlmath.engines.tool_parsers import vllm_tool_parser

        if isinstance(tokenizer, LightTokenizer):  # It has less than those parsers need.
            tokenizer = load_tokenizer(tokenizer.name_or_path)
        parse = vllm_tool_parser(name, tokenizer, self.schemas)
        return lambda text: [ToolCall(called, arguments_in(a)) for called, a in parse(text)] or None

    def environment(self, turn_format: TurnFormat, parallel: int) -> Environment:
        """The environment. ``turn_format``: reads the calls of a turn. ``parallel``: number of
        turns that are answered at once."""
        most = self._rollout.max_calls
        tools: list[Tool] = [
            python_tool(self._rollout, parallel) if name == PYTHON else self._functions[name]
            for name in self._rollout.tools
        ]
        if self.made_of is None:
            return ToolEnvironment(turn_format, tools, most)
        return ClassEnvironment(self.made_of, turn_format, tools, most)


def python_tool(rollout: RolloutConfig, parallel: int) -> PythonTool:
    """The Python tool. ``parallel``: number of concurrent calls."""
    seconds = rollout.call_timeout_s
    given = {"max_parallel": parallel} if rollout.python_provider == "local" else {}
    return PythonTool(
        get_provider(rollout.python_provider, **(given | rollout.python_provider_settings)),
        Limits(cpu_s=math.ceil(seconds), wall_s=seconds),
        output_bytes=BYTES_PER_TOKEN * rollout.max_observation_tokens,
        session=rollout.python_session,
        ahead=min(4, parallel),
    )


def prompt_tokenizer(config: Config, tokenizer: Any) -> Any:
    """The tokenizer for prompts that are answered in turns: its chat template lists the tools, and
    the environment may add text to a problem. Raises ConfigError: as :class:`Chosen` and
    :meth:`Chosen.format_of`."""
    if not has_turns(config.rollout):
        return tokenizer
    chosen = Chosen(config.rollout)
    found = chosen.format_of(config, tokenizer)
    template: str | None = tokenizer.chat_template
    tools: tuple[Mapping[str, Any], ...] = ()
    if isinstance(found, ChatFormat):
        template, tools = found.template, tuple(chosen.schemas)
    opening = None if chosen.made_of is None else chosen.made_of.opening
    return EnvironmentTokenizer(tokenizer, template, tools, opening)
