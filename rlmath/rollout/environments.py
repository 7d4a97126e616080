"""The environment that the settings describe."""

from __future__ import annotations

import os

from rlmath.config.rollout import has_turns
from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.environments.chosen import Chosen
from rlmath.rollout.episodes import Episodes


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
        chosen.environment(turn_format, parallel),
        turn_format,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        max_turns=rollout.max_turns,
        wall_s=rollout.tools_timeout_s,
        parallel=parallel,
    )
