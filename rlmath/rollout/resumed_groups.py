"""Check that a checkpoint's groups fit the settings of the resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.rollout.group_state import response_tokens


def check_resumed_groups(config: Config, path: Path, sampler: Mapping[str, Any]) -> None:
    """Check the groups of a checkpoint that are still to be sampled or trained on, before anything
    is started. Raises UserError: engines or ranks would be set up for shorter responses than the
    groups have.

    Args:
        path: Path of the checkpoint, for the message.
        sampler: The sampler's state in it.
    """
    limit = config.rollout.max_response_tokens
    live = [group["max_tokens"] for group in sampler.get("live", ())]
    waiting = [
        response_tokens(one["sample"])
        for _, group in sampler.get("carried_over", ())
        for one in group["samples"]
    ]
    longest = max([0, *live, *waiting])
    if longest > limit:
        what = (
            f"{len(live)} groups are unfinished, and their responses may have up to {longest}"
            if longest in live
            else f"a group that waits for training has a response of {longest}"
        )
        raise UserError(
            f"rollout.max_response_tokens={limit}: {path} was made with longer responses: {what} "
            f"tokens. Resume with rollout.max_response_tokens={longest} or more; "
            "algorithm.curriculum.length_stages can limit the responses of new groups"
        )
