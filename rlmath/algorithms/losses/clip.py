"""Bounds of the importance ratio, shared by several losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.algorithms.losses.base import LossInputs
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


def dual_clip_setting() -> Any:
    """The setting ``dual_clip`` of a loss that is unbounded for negative advantages."""
    return setting(
        None,
        "Dual clip: for negative advantages the loss is at most this times |advantage|; null: off.",
        above=1,
    )


@dataclass(frozen=True)
class ClipOptions(Options):
    """Clip range of the ratio."""

    # At 1 there is no lower bound.
    clip_low: float = setting(
        0.2, "Lower clip range: the importance ratio is clipped at 1 - clip_low.", least=0, most=1
    )
    clip_high: float = setting(
        0.2, "Upper clip range: the importance ratio is clipped at 1 + clip_high.", least=0
    )


@dataclass(frozen=True)
class DualClipOptions(ClipOptions):
    """Clip range of the ratio, and its cap for negative advantages."""

    dual_clip: float | None = dual_clip_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1.0 + self.clip_high:
            raise ValueError(
                f"dual_clip = {self.dual_clip} has to be more than 1 + clip_high = "
                f"{1.0 + self.clip_high:g}; 3 is usual, null turns it off"
            )


def dual_clipped(
    losses: Tensor,
    advantages: Tensor,
    ratio: Tensor,
    dual_clip: float | None,
    flags: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cap the losses at ``-dual_clip A`` where ``A < 0``; no change without ``dual_clip``.

    Dual clip (arXiv:1912.09729), eq. 5. Equivalent to a cap on the ratio of tokens with a negative
    advantage, which has no other bound.

    Args:
        losses: ``[r]``, of the form ``-ratio A`` for tokens beyond the cap.
        advantages: ``[r]``.
        ratio: ``[r]``, of the token or its sequence.
        dual_clip: Maximum ratio for a negative advantage.
        flags: Flags to which ``dual_clip_fraction`` is added.
    """
    if dual_clip is None:
        return losses, flags
    negative = advantages < 0
    cap = -advantages * dual_clip
    flags = flags | {"dual_clip_fraction": negative & (ratio > dual_clip)}
    return torch.where(negative, torch.minimum(losses, cap), losses), flags


def clip_ratio(
    inputs: LossInputs, options: DualClipOptions, ratio: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate for a ratio ``[r]``, of the token or its sequence, and the flags of
    clipped tokens."""
    advantages = inputs.token_advantages()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    flags = {
        "clip_fraction_low": (advantages < 0) & (ratio < low),
        "clip_fraction_high": (advantages > 0) & (ratio > high),
    }
    return dual_clipped(losses, advantages, ratio, options.dual_clip, flags)
