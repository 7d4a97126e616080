"""Whitening of weighted values to mean 0 and standard deviation 1."""

from __future__ import annotations

from rlmath.algorithms.peers import ALONE, Peers
from rlmath.utils.lazy_torch import Tensor, torch


def whiten(values: Tensor, counts: Tensor, epsilon: float = 1e-6, peers: Peers = ALONE) -> Tensor:
    """``(v - mean) / (std + epsilon)``, where value ``i`` counts ``counts[i]`` times.

    Bessel's standard deviation: the sum of squares is divided by the number of values minus one.
    Equal values give exactly 0.

    Args:
        values: ``[N]`` float64.
        counts: ``[N]`` multiplicity of each value; values with count 0 get 0.
        epsilon: Added to the standard deviation.
        peers: Ranks whose values are included in mean and standard deviation.

    Returns:
        ``[N]`` float64.
    """
    counts = counts.double()
    present = counts > 0
    seen = values[present]
    extremes = [seen.min(), -seen.max()] if seen.numel() else [values.new_tensor(torch.inf)] * 2
    own = torch.stack([counts.sum(), (values * counts).sum(), *extremes])
    of_ranks = peers.gather(own)
    total, low, high = of_ranks[:, 0].sum(), of_ranks[:, 2].amin(), -of_ranks[:, 3].amin()
    if low >= high:
        return torch.zeros_like(values)
    mean = of_ranks[:, 1].sum() / total
    squares = ((values - mean).square() * counts).sum()
    std = peers.gather(squares[None]).sum().div((total - 1).clamp(min=1)).sqrt()
    return torch.where(present, (values - mean) / (std + epsilon), 0.0)
