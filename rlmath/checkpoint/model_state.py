"""A model's weights as a checkpoint saves them: each tensor with its place in the whole."""

from __future__ import annotations

from typing import Any


def sharding() -> dict[str, Any]:
    """How Megatron is to describe the tensors' places, afresh: it adds its process groups to it."""
    return {
        # Optimizer tensors in the shape of the parameters, so that any layout can reshard them.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        # Each layer by its number, rather than all stacked: simpler, and much faster to describe.
        "non_homogeneous_layers": True,
    }


def sharded_weights(module: Any, prefix: str = "") -> dict[str, Any]:
    """Megatron's description of a stage's weights, by their names in the stage.

    Without Transformer Engine's extra state: it holds scales of delayed FP8 scaling, which is not
    offered, and loading it executes pickled code.
    """
    described = module.sharded_state_dict(prefix=prefix, metadata=sharding())
    return {name: entry for name, entry in described.items() if not is_extra_state(name)}


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is that of Transformer Engine's extra state.

    Megatron numbers those of a layer with several experts: ``_extra_state``, ``_extra_state1``,
    ``_extra_state2``, ...
    """
    return name.rpartition(".")[2].rstrip("0123456789") == "_extra_state"
