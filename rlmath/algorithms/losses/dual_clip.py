"""A cap on the ratio of tokens with a negative advantage, which no other bound holds."""

from __future__ import annotations

from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.utils.lazy_torch import Tensor, torch


def dual_clipped(
    losses: Tensor,
    advantages: Tensor,
    ratio: Tensor,
    settings: ObjectiveSettings,
    flags: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses, at most ``-dual_clip A`` where ``A < 0``; unchanged without a ``dual_clip``.

    Dual clip (arXiv:1912.09729), eq. 5. It is the same as a cap on the ratio.

    Args:
        losses: ``[r]``, of the form ``-ratio A`` for tokens beyond the cap.
        advantages: ``[r]``.
        ratio: ``[r]``, the token's or its sequence's.
        flags: ``dual_clip_fraction`` is added.
    """
    if settings.dual_clip is None:
        return losses, flags
    negative = advantages < 0
    cap = -advantages * settings.dual_clip
    flags = flags | {"dual_clip_fraction": negative & (ratio > settings.dual_clip)}
    return torch.where(negative, torch.minimum(losses, cap), losses), flags
