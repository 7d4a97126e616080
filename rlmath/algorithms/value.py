"""The value model's loss, for PPO with ``gae``."""

from __future__ import annotations

from rlmath.utils.lazy_torch import Tensor, torch


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> Tensor:
    """Half the squared error of each value, with the change of the value clipped.

    ``max((v - R)^2, (v_c - R)^2) / 2`` with ``v_c = v_old + clamp(v - v_old, -clip, clip)``, as in
    PPO's reference implementation. Summed with the policy loss's token weights.

    Args:
        values: ``[r]``, of the value model being trained; with gradient.
        old_values: ``[r]``, before this step's first update; used by ``gae``.
        returns: ``[r]``, from ``gae``.
        mask: ``[r]`` bool; false tokens get 0, whatever their values.
        clip: Maximum change, in units of the reward; ``None``: no bound.

    Returns:
        ``[r]``.
    """
    zero = torch.zeros_like(values)
    moved = torch.where(mask, values - old_values, zero)
    error = torch.where(mask, values - returns, zero)
    losses = error.square()
    if clip is not None:
        losses = torch.maximum(losses, (error - moved + moved.clamp(-clip, clip)).square())
    return 0.5 * losses
