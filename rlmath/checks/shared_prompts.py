"""``actor.share_prompts=always`` where the actor cannot share them."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import SharePrompts
from rlmath.config.schema import Config, Device
from rlmath.config.shared_prompts import sharing_problem
from rlmath.model.spec import ModelSpec


def share_prompts(
    config: Config, model: ModelSpec | None, device: Device, command: str
) -> Iterator[str]:
    """One message with the reason why it is impossible; ``model`` is ``None`` if unknown."""
    actor = config.actor
    if command == "evaluate" or actor.share_prompts is not SharePrompts.always:
        return
    problem = sharing_problem(model, device.value, actor.context_parallel)
    if problem is not None:
        yield f"actor.share_prompts=always: {problem}; use auto"
