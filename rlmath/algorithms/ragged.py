"""Values of sequences as values of their tokens."""

from __future__ import annotations

from rlmath.utils.lazy_torch import Tensor, torch


def repeat(values: Tensor, counts: Tensor) -> Tensor:
    """``[sum(counts)]``, each of ``[N]`` values as often as its count says.

    Args:
        values: On the CPU.
        counts: ``[N]`` int64, on the CPU.
    """
    import numpy as np

    # torch.repeat_interleave takes a hundred times longer on a CPU.
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
