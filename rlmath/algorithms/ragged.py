"""Expand values of sequences to values of their tokens."""

from __future__ import annotations

from rlmath.utils.lazy_torch import Tensor, torch


def repeat(values: Tensor, counts: Tensor) -> Tensor:
    """``[sum(counts)]``, each of the ``[N]`` values repeated by its count.

    Args:
        values: ``[N]``, on the CPU.
        counts: ``[N]`` int64, on the CPU.
    """
    import numpy as np

    # torch.repeat_interleave is a hundred times slower on a CPU.
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
