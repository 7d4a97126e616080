"""Values inside an engine's layers, under the weights that it has, by the keys of ``hooks.py``."""

from __future__ import annotations

import torch

from rlmath.engines.layer_values import AFTER_LAYERS, Noted, Values
from rlmath.engines.protocol import Engine
from rlmath.rollout.pool import RolloutPool


def engine_values(pool: RolloutPool, tokens: list[int], layers: int) -> Values | None:
    """Values that the first engine computes from one sequence.

    Returns:
        Float32 values on the host; of the output layer only the last row. ``None``: the engine has
        other requests, whose tokens would be among these.
    """
    noted = pool.ask(Engine.layer_values, tokens)[0]
    if noted is None:
        return None
    values = together(noted)
    return {(layers if at == AFTER_LAYERS else at, step): v for (at, step), v in values.items()}


def together(workers: list[Noted]) -> Values:
    """One engine's values from its workers', in the order of their tensor ranks."""
    values: Values = {}
    for key in workers[0]:
        parts = [noted[key] for noted in workers if key in noted]
        columns = parts[0][1]
        tensors = [part for part, _ in parts]
        values[key] = torch.cat(tensors, -1) if columns else tensors[0]
    return values
