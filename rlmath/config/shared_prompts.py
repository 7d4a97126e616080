"""Where samples of a group can share the rows of their prompt (``actor.share_prompts``)."""

from __future__ import annotations

from rlmath.config.actor import SharePrompts
from rlmath.model.spec import ModelSpec


def sharing_problem(spec: ModelSpec | None, device: str, context_parallel: int) -> str | None:
    """Why the actor cannot share prompts; ``None``: it can."""
    if device != "cpu":
        return "attention on CUDA takes each sequence with its prompt, and cluster.device is cuda"
    if context_parallel > 1:
        return (
            f"actor.context_parallel={context_parallel} gives each rank pieces of whole sequences"
        )
    if spec is None:
        return None
    if spec.experts:
        return "a MoE's balance loss and its routes count the tokens of each sequence"
    if spec.linear is not None:
        return "the state of linear attention is that of one sequence, from its start"
    if spec.latent is not None:
        return "the rotary embedding of latent attention counts positions from a sequence's start"
    return None


def shares_prompts(
    chosen: SharePrompts, spec: ModelSpec, device: str, context_parallel: int
) -> bool:
    """Whether the actor shares prompts; see :func:`sharing_problem`."""
    if chosen is SharePrompts.auto:
        return sharing_problem(spec, device, context_parallel) is None
    return chosen is SharePrompts.always
