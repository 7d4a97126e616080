"""Slices of the weights: what one comparison covers where comparing all of them takes too long.

A rotation splits the weights into units that cost little each, and goes through all of them in
rounds. Every unit is in exactly one slice of a round, in an order that differs from round to round,
so that a fault of any layer or kind of tensor is met early in a round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from rlmath.weights.fingerprint import add, fingerprint

# From a column of a whole tensor to before another.
Columns = tuple[int, int]
# By a tensor's name, its columns in the slice; ``None``: all of it.
WeightSlice = Mapping[str, tuple[Columns, ...] | None]

# Of a matrix that a CPU engine packed, read back by one product: as many rows of the other factor
# as oneDNN needs to be as fast as with more.
COLUMNS = 16
# What an element costs to digest, in multiply-adds of that product.
_DIGEST = 200
# Matrices that vLLM keeps as one, so that one product reads the same columns of all.
_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "qkv_a",
    "kv_a_proj_with_mqa": "qkv_a",
}


def columns_in(part: WeightSlice | None, name: str, start: int, count: int) -> list[Columns]:
    """Which columns of a run of a matrix are in a slice.

    Args:
        part: The slice; ``None``: everything.
        name: The tensor.
        start: The run's first column in the whole tensor.
        count: Its columns.

    Returns:
        Columns of the run, from its own first.
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
    """What the columns of a run that are in a slice add to the fingerprint of the tensor's.

    Args:
        part: The slice; ``None``: everything.
        name: The tensor.
        values: The run.
        row: Place of its first row in the whole tensor.
        column: Place of its first column.
        dtype: That the values are converted to first; ``None``: their own.
    """
    dtype = dtype or values.dtype
    if part is None or (name in part and part[name] is None):
        return fingerprint(values.to(dtype), row, column)
    total = 0
    for low, high in columns_in(part, name, column, values.shape[1]):
        total = add(total, fingerprint(values[:, low:high].to(dtype), row, column + low))
    return total


class Rotation:
    """Takes the weights slice by slice, in rounds.

    Args:
        shapes: Of every tensor that engines hold, by name.
        packed: Whether engines packed matrices so that they are read back by a product; their units
            are ``COLUMNS`` columns, and others are whole tensors.
        whole: Names of the matrices of an MoE's experts, of which each is a unit.

    Attributes:
        work: Of all units together, about the multiply-adds that read them back.
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
        self.work = sum(work for *_, work in self._units)
        self._round = -1
        self.restart()

    def restart(self) -> None:
        """Begin a round."""
        self._round += 1
        self._order = list(range(len(self._units)))
        random.Random(self._round).shuffle(self._order)
        self._at = 0

    @property
    def is_at_start(self) -> bool:
        """Whether nothing of the present round was taken."""
        return self._at == 0

    def pop(self, work: float) -> tuple[dict[str, tuple[Columns, ...] | None], float]:
        """The next slice of the round; after the last one a round begins.

        Args:
            work: How much it may be; at least one unit is taken.

        Returns:
            The slice, and its work.
        """
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
        # Vectors go along with matrices: norms alone may be equal in bfloat16 after an update.
        begin, end = (at * len(self._small) // len(self._order) for at in (first, self._at))
        found |= dict.fromkeys(self._small[begin:end])
        if self._at == len(self._order):
            self.restart()
        return found, taken
