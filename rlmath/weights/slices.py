"""Slices of the weights, for comparisons when comparing all of them takes too long.

A rotation splits the weights into cheap units and iterates over all of them in rounds. Every unit
is in exactly one slice of a round, in an order that differs between rounds, so a fault in any layer
or kind of tensor is found early in a round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from rlmath.weights.fingerprint import add, fingerprint

# First column in a whole tensor, and the column after the last.
Columns = tuple[int, int]
# Columns in the slice by tensor name; ``None``: the whole tensor.
WeightSlice = Mapping[str, tuple[Columns, ...] | None]

# Columns of a packed matrix of a CPU engine that one product reads back: as many as oneDNN needs
# for full speed.
COLUMNS = 16
# Cost of fingerprinting an element, in multiply-adds of that product.
_DIGEST = 200
# Matrices that vLLM fuses, so that one product reads the same columns of all.
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "qkv_a",
    "kv_a_proj_with_mqa": "qkv_a",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}


def columns_in(part: WeightSlice | None, name: str, start: int, count: int) -> list[Columns]:
    """The columns of a run of a matrix that are in a slice. Returns columns relative to the run.

    Args:
        part: The slice; ``None``: everything.
        start: The run's first column in the whole tensor.
    """
    chosen = () if part is not None and name not in part else None if part is None else part[name]
    if chosen is None:
        return [(0, count)]
    ends = ((max(low - start, 0), min(high - start, count)) for low, high in chosen)
    return [(low, high) for low, high in ends if low < high]


def fingerprint_in(
    part: WeightSlice | None,
    name: str,
    values: Tensor,
    row: int,
    column: int,
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """Contribution of a run's columns in a slice to its tensor's fingerprint.

    Args:
        part: The slice; ``None``: everything.
        row: Index of its first row in the whole tensor.
        column: Index of its first column.
        dtype: Type to which the values are first converted; ``None``: none.
    """
    dtype = dtype or values.dtype
    if part is None or (name in part and part[name] is None):
        return fingerprint(values.to(dtype), row, column)
    total = 0
    for low, high in columns_in(part, name, column, values.shape[1]):
        total = add(total, fingerprint(values[:, low:high].to(dtype), row, column + low))
    return total


class Rotation:
    """Iterates over the weights slice by slice, in rounds.

    Args:
        shapes: Shape of every tensor of the engines, by name.
        packed: Whether engines packed matrices, which are then read back by a product. Units of
            matrices are then ``COLUMNS`` columns; others are whole tensors.
        whole: Names of the matrices of an MoE's experts, each of which is a unit.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        packed: bool,
        whole: frozenset[str] = frozenset(),
    ) -> None:
        matrices: dict[tuple[str, int], list[str]] = {}
        self._small: list[str] = []
        for name, shape in shapes.items():
            if len(shape) < 2:
                self._small.append(name)
                continue
            module = name.removesuffix(".weight")
            stem, _, last = module.rpartition(".")
            if name in whole:
                matrices.setdefault((stem, 0), []).append(name)
            elif packed:
                kept = f"{stem}.{_FUSED.get(last, last)}"
                matrices.setdefault((kept, shape[1]), []).append(name)
            else:
                matrices.setdefault((name, 0), []).append(name)
        self._units: list[tuple[tuple[str, ...], Columns | None, float]] = []
        for (_, columns), names in matrices.items():
            elements = sum(math.prod(shapes[name]) for name in names)
            if not columns:
                self._units.append((tuple(names), None, float(_DIGEST * elements)))
                continue
            for low in range(0, columns, COLUMNS):
                high = min(low + COLUMNS, columns)
                share = (high - low) / columns
                work = share * elements * (columns + _DIGEST)
                self._units.append((tuple(names), (low, high), work))
        # Total cost of all units, in multiply-adds for reading them back.
        self.work = sum(work for *_, work in self._units)
        self._round = -1
        self.restart()

    def restart(self) -> None:
        """Start a new round."""
        self._round += 1
        self._order = list(range(len(self._units)))
        random.Random(self._round).shuffle(self._order)
        self._at = 0

    @property
    def is_at_start(self) -> bool:
        """Whether nothing of the current round was popped."""
        return self._at == 0

    def pop(self, work: float) -> tuple[dict[str, tuple[Columns, ...] | None], float]:
        """The next slice of the round; after the last one a new round starts. ``work``: maximum
        work of the slice; it has at least one unit. Returns the slice, and its work."""
        found: dict[str, tuple[Columns, ...] | None] = {}
        taken, first = 0.0, self._at
        while self._at < len(self._order):
            names, columns, cost = self._units[self._order[self._at]]
            if self._at > first and taken + cost > work:
                break
            self._at += 1
            taken += cost
            for name in names:
                found[name] = None if columns is None else (*(found.get(name) or ()), columns)
        # Vectors accompany matrices: norms alone may not change in bfloat16 by an update.
        begin, end = (at * len(self._small) // len(self._order) for at in (first, self._at))
        found |= dict.fromkeys(self._small[begin:end])
        if self._at == len(self._order):
            self.restart()
        return found, taken
