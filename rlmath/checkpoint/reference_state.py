"""The reference model of a KL term in checkpoints, when it is no longer the initial model."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.model_state import sharded_weights

PREFIX = "reference."


def sharded_reference(module: Any, reference: list[Tensor]) -> dict[str, Any]:
    """The reference's weights with their places in the full tensors, as those of the model."""
    own = _by_name(module, reference)
    described = sharded_weights(module, PREFIX)
    state = {}
    for key, entry in described.items():
        tensor = own.get(key.removeprefix(PREFIX))
        if tensor is None:
            continue
        changes: dict[str, Any] = {"data": tensor}
        if hasattr(entry, "dtype"):  # A factory, which splits a tensor in two, has none.
            changes["dtype"] = tensor.dtype
        state[key] = dataclasses.replace(entry, **changes)
    return state


def load_reference(module: Any, reference: list[Tensor], loaded: dict[str, Tensor]) -> None:
    """Set the reference to the loaded weights. Raises BrokenCheckpoint: a weight is missing."""
    for name, tensor in _by_name(module, reference).items():
        if PREFIX + name not in loaded:
            raise BrokenCheckpoint(f"the reference model's {name} is missing")
        tensor.copy_(loaded[PREFIX + name])


def _by_name(module: Any, reference: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(trained_names(module), reference, strict=True))


def trained_names(module: Any) -> list[str]:
    return [name for name, one in module.named_parameters() if one.requires_grad]
