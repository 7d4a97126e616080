"""Sums over all data-parallel ranks, for algorithms that need the whole step.

Most of a step's computation is per token or sequence. Whitening and the top-entropy share need the
whole step: each rank contributes its own sequences' numbers, and all ranks get the same totals,
added in the same order.
"""

from __future__ import annotations

from typing import Protocol

from rlmath.utils.lazy_torch import Tensor


class Peers(Protocol):
    """The ranks that hold the other sequences of the step."""

    def gather(self, mine: Tensor) -> Tensor:
        """``[ranks, n]`` float64 from ``[n]`` of each rank, equal on all."""

    def add(self, mine: Tensor) -> Tensor:
        """``[n]`` int64, the sum of ``[n]`` of each rank."""


class Alone:
    """A single rank that holds the whole step."""

    def gather(self, mine: Tensor) -> Tensor:
        return mine[None]

    def add(self, mine: Tensor) -> Tensor:
        return mine


ALONE = Alone()
