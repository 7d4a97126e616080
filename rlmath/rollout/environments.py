"""The environment that the settings describe."""

from __future__ import annotations

import os

from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.environments.fenced import Fenced
from rlmath.environments.python_blocks import PythonBlocks
from rlmath.rewards.sandbox.provider import get_provider
from rlmath.rollout.episodes import EpisodeLimits, Episodes


def episodes_of(config: Config) -> Episodes | None:
    """What answers the model's turns; ``None``: each response is one turn.

    Raises:
        UserError: No sandbox works on this machine, or the model has no tokenizer.
    """
    rollout = config.rollout
    if not rollout.tools:
        return None
    tokenizer = load_tokenizer(config.model.path)
    turn_format = Fenced(tokenizer, rollout.max_observation_tokens)
    parallel = rollout.parallel_calls or os.cpu_count() or 1
    return Episodes(
        PythonBlocks(
            turn_format,
            get_provider("local", max_parallel=parallel),
            rollout.call_timeout_s,
            rollout.max_calls,
        ),
        turn_format,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        EpisodeLimits(rollout.max_turns, rollout.tools_timeout_s),
        parallel,
    )
