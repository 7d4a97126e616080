"""PPO's clipped surrogate, with separate bounds and an optional dual clip."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, policy_loss
from rlmath.algorithms.losses.clip import DualClipOptions, dual_clipped
from rlmath.utils.lazy_torch import Tensor, torch


@policy_loss("ppo_clip", DualClipOptions)
def ppo_clip(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r`` the token's ratio.

    PPO (arXiv:1707.06347), eq. 7; separate bounds ("clip-higher") from DAPO (arXiv:2503.14476),
    eq. 8 and §3.1. With ``dual_clip = c`` the loss of a token with ``A < 0`` is at most ``-c A``
    (dual clip, arXiv:1912.09729), which is equivalent to capping its ratio at ``c``: the two-sided
    clip of INTELLECT-2 (arXiv:2505.07291).
    """
    ratio = inputs.log_ratio().exp()
    advantages = inputs.token_advantages()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    flags = {
        "clip_fraction_low": (advantages < 0) & (ratio < low),
        "clip_fraction_high": (advantages > 0) & (ratio > high),
    }
    return dual_clipped(losses, advantages, ratio, options.dual_clip, flags)
