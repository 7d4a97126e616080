"""The environment that the settings describe."""

from __future__ import annotations

import math
import os

from rlmath.config.environments import PYTHON
from rlmath.config.schema import Config, RolloutConfig
from rlmath.data import load_tokenizer
from rlmath.environments.chosen import functions_of, output_bytes, schemas_of
from rlmath.environments.fenced import Fenced
from rlmath.environments.python_tool import PythonTool
from rlmath.environments.tools import ToolEnvironment
from rlmath.rewards.sandbox import Limits
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rollout.episodes import EpisodeLimits, Episodes


def episodes_of(config: Config) -> Episodes | None:
    """Answers of the model's turns; ``None``: each response is one turn.

    Raises:
        UserError: No sandbox works on this machine, or the model has no tokenizer.
    """
    rollout = config.rollout
    if not rollout.tools:
        return None
    tokenizer = load_tokenizer(config.model.path)
    turn_format = Fenced(tokenizer, schemas_of(rollout), rollout.max_observation_tokens)
    parallel = rollout.parallel_calls or os.cpu_count() or 1
    functions = functions_of(rollout)
    tools = [_python(rollout, parallel) if n == PYTHON else functions[n] for n in rollout.tools]
    return Episodes(
        ToolEnvironment(turn_format, tools, rollout.max_calls),
        turn_format,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        EpisodeLimits(rollout.max_turns, rollout.tools_timeout_s),
        parallel,
    )


def _python(rollout: RolloutConfig, parallel: int) -> PythonTool:
    seconds = rollout.call_timeout_s
    limits = Limits(cpu_s=math.ceil(seconds), wall_s=seconds)
    return PythonTool(
        LocalProvider(parallel),
        limits,
        output_bytes=output_bytes(rollout),
        ahead=min(4, parallel),
        retries=0,  # Episodes are tried again.
    )
