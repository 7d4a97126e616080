"""Totals over tokens, which add up over ranks, minibatches and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from rlmath.utils.lazy_torch import Tensor, torch


def add(one: Any, other: Any) -> Any:
    """The sum of two numbers or totals, of tuples by item, or of mappings by key."""
    if isinstance(one, Mapping):
        both = one.keys() & other.keys()
        summed = {key: add(one[key], other[key]) for key in both}
        return dict(sorted(({**one, **other} | summed).items()))
    if isinstance(one, tuple):
        return tuple(add(a, b) for a, b in zip(one, other, strict=True))
    return one + other


@dataclass(frozen=True)
class Totals:
    def __add__(self, other: Self) -> Self:
        names = [one.name for one in fields(self)]
        sums = (add(getattr(self, name), getattr(other, name)) for name in names)
        return type(self)(*sums)  # type: ignore[call-arg]

    @classmethod
    def by_value(cls, values: Tensor, mask: Tensor, *flags: Tensor) -> dict[int, Self]:
        """Counts of the mask and of each flag for each value, such as a version, that has tokens.

        Args:
            values: ``[r]`` int64.
            mask: ``[r]`` bool, tokens of the loss.
            flags: ``[r]`` bool each.
        """
        return {
            value: cls(*(int((flag & (values == value)).sum()) for flag in (mask, *flags)))  # type: ignore[call-arg]
            for value in torch.unique(values[mask]).tolist()
        }
