"""Mean 0 and standard deviation 1 over weighted values."""

from __future__ import annotations

from rlmath.utils.lazy_torch import Tensor, torch


def whiten(values: Tensor, counts: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``(v - mean) / (std + epsilon)`` where value ``i`` stands ``counts[i]`` times.

    The standard deviation is Bessel's: the sum of squares is divided by the number of values less
    one. Equal values give exactly 0.

    Args:
        values: ``[N]`` float64.
        counts: ``[N]`` how often each stands; values that stand 0 times get 0.
        epsilon: Added to the standard deviation.

    Returns:
        ``[N]`` float64.
    """
    counts = counts.double()
    total = counts.sum()
    present = counts > 0
    if not present.any() or bool((values[present] == values[present][0]).all()):
        return torch.zeros_like(values)
    mean = (values * counts).sum() / total
    std = ((values - mean).square() * counts).sum().div((total - 1).clamp(min=1)).sqrt()
    return torch.where(present, (values - mean) / (std + epsilon), 0.0)
