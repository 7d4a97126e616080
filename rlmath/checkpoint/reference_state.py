"""The reference model of a KL term in checkpoints, when it is no longer the model that a run began
with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.optimizer_state import sharding

if TYPE_CHECKING:
    from rlmath.actor.actor import MegatronActor

PREFIX = "reference."


def has_own_reference(actor: MegatronActor) -> bool:
    """Whether the reference has to be saved: a frozen one is read from the model's folder again."""
    return actor.settings.reference.renewed


def sharded_reference(actor: MegatronActor) -> dict[str, Any]:
    """The reference's weights with their places in the whole, described as the model's are."""
    own = _by_name(actor)
    described = actor.module.sharded_state_dict(prefix=PREFIX, metadata=sharding())  # type: ignore[operator]
    state = {}
    for key, entry in described.items():
        tensor = own.get(key.removeprefix(PREFIX))
        if tensor is None:
            continue
        changes: dict[str, Any] = {"data": tensor}
        if hasattr(entry, "dtype"):  # A factory, which cuts a tensor in two, has none.
            changes["dtype"] = tensor.dtype
        state[key] = dataclasses.replace(entry, **changes)
    return state


def load_reference(actor: MegatronActor, loaded: dict[str, Tensor]) -> None:
    """Set the reference to what was loaded.

    Raises:
        BrokenCheckpoint: A weight is missing.
    """
    for name, tensor in _by_name(actor).items():
        if PREFIX + name not in loaded:
            raise BrokenCheckpoint(f"the reference model's {name} is missing")
        tensor.copy_(loaded[PREFIX + name])


def _by_name(actor: MegatronActor) -> dict[str, Tensor]:
    assert actor.reference is not None
    names = [name for name, _ in actor.module.named_parameters()]
    return dict(zip(names, actor.reference, strict=True))
