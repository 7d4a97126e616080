"""A part of a Hugging Face tensor on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Rows (``dim`` 0) or columns (``dim`` 1) of a Hugging Face tensor on one rank."""

    name: str  # The Hugging Face tensor.
    dim: int  # Dimension of the run.
    start: int  # First row or column.
    shape: tuple[int, ...]  # Shape of the run.

    @property
    def length(self) -> int:
        return self.shape[self.dim]

    @property
    def corner(self) -> tuple[int, int]:
        """First row and column in the whole tensor."""
        return (self.start, 0) if self.dim == 0 else (0, self.start)

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.length)

    def between(self, begin: int, end: int) -> Run | None:
        """The part between ``begin`` and ``end`` (exclusive) of the tensor's rows or columns;
        ``None`` if empty."""
        begin, end = max(begin, self.start), min(end, self.start + self.length)
        if begin >= end:
            return None
        shape = (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])
        return Run(self.name, self.dim, begin, shape)
