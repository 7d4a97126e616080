"""A part of a Hugging Face tensor that lies on one rank, or that one needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Rows (``dim`` 0) or columns (``dim`` 1) of a Hugging Face tensor that lie on one rank.

    Attributes:
        name: The Hugging Face tensor.
        dim: Along which it is a run.
        start: First row or column.
        shape: Of the run.
    """

    name: str
    dim: int
    start: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shape[self.dim]

    @property
    def corner(self) -> tuple[int, int]:
        """Its first row and column in the whole tensor."""
        return (self.start, 0) if self.dim == 0 else (0, self.start)

    def of(self, whole: Tensor) -> Tensor:
        """This run of the whole tensor, as a view."""
        return whole.narrow(self.dim, self.start, self.length)

    def between(self, begin: int, end: int) -> Run | None:
        """What of it is from row or column ``begin`` of the tensor to before ``end``; ``None``:
        nothing."""
        begin, end = max(begin, self.start), min(end, self.start + self.length)
        if begin >= end:
            return None
        shape = (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])
        return Run(self.name, self.dim, begin, shape)
