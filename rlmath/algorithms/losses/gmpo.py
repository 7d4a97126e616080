"""The geometric mean over a sequence's clipped token ratios."""

from __future__ import annotations

import math

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.algorithms.losses.clip import DualClipOptions, dual_clipped
from rlmath.utils.lazy_torch import Tensor, torch


@policy_loss("gmpo", DualClipOptions, LossTraits(("seq_mean_token_mean",), of_sequences=True))
def gmpo(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A exp(mean over the sequence of clipped log r)`` for each token of a sequence.

    Token ratios are clipped as in PPO, on the side toward which the advantage pushes, and then
    averaged geometrically, so outliers do not dominate a sequence. GMPO (arXiv:2507.20673).
    The paper's bounds ``e^-0.4`` and ``e^0.4`` are ``clip_low = 0.33`` and ``clip_high = 0.49``.
    With ``dual_clip = c`` the loss is at most ``-c A`` where ``A < 0``.
    """
    advantages = inputs.token_advantages()
    log_ratio = inputs.log_ratio()
    low = math.log(1.0 - options.clip_low) if options.clip_low < 1.0 else -math.inf
    high = math.log(1.0 + options.clip_high)
    bounded = torch.where(
        advantages > 0,
        log_ratio.clamp(max=high),
        torch.where(advantages < 0, log_ratio.clamp(min=low), log_ratio),
    )
    flags = {
        "clip_fraction_low": (advantages < 0) & (log_ratio < low),
        "clip_fraction_high": (advantages > 0) & (log_ratio > high),
    }
    ratio = inputs.sequence_mean(bounded).exp()
    return dual_clipped(-advantages * ratio, advantages, ratio, options.dual_clip, flags)
