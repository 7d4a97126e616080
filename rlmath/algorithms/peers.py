"""Sums over all data-parallel ranks, for algorithms that need the whole step.

Most of what a step computes belongs to a token or a sequence. Whitening and the share of the
highest entropies need all of them: each rank passes its own sequences' figures, and all ranks get
the same totals, added in the same order.
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
    """Nobody else: the step is here."""

    def gather(self, mine: Tensor) -> Tensor:
        """``[1, n]``."""
        return mine[None]

    def add(self, mine: Tensor) -> Tensor:
        """What it is given."""
        return mine


ALONE = Alone()
