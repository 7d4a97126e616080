"""The environment that the settings describe."""

from __future__ import annotations

import math
import os

from rlmath.config.rollout import has_turns
from rlmath.config.schema import Config, RolloutConfig
from rlmath.data import load_tokenizer
from rlmath.environments.chosen import Chosen, output_bytes
from rlmath.environments.python_tool import PythonTool
from rlmath.rewards.sandbox import Limits, get_provider
from rlmath.rollout.episodes import EpisodeLimits, Episodes


def episodes_of(config: Config) -> Episodes | None:
    """Answers of the model's turns; ``None``: each response is one turn. Raises UserError: no
    sandbox works on this machine, or the model has no tokenizer."""
    rollout = config.rollout
    if not has_turns(rollout):
        return None
    tokenizer, chosen = load_tokenizer(config.model.path), Chosen(rollout)
    turn_format = chosen.format_of(config, tokenizer)
    parallel = rollout.parallel_calls or os.cpu_count() or 1
    return Episodes(
        chosen.environment(turn_format, lambda: _python(rollout, parallel)),
        turn_format,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        EpisodeLimits(rollout.max_turns, rollout.tools_timeout_s),
        parallel,
    )


def _python(rollout: RolloutConfig, parallel: int) -> PythonTool:
    seconds = rollout.call_timeout_s
    limits = Limits(cpu_s=math.ceil(seconds), wall_s=seconds)
    given = {"max_parallel": parallel} if rollout.python_provider == "local" else {}
    return PythonTool(
        get_provider(rollout.python_provider, **(given | rollout.python_provider_settings)),
        limits,
        output_bytes=output_bytes(rollout),
        session=rollout.python_session,
        ahead=min(4, parallel),
        retries=0,  # Episodes are tried again.
    )
