"""Policy gradient weighted by the clipped importance ratio, so every token has a gradient."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.algorithms.losses.clip import ClipOptions
from rlmath.utils.lazy_torch import Tensor


@policy_loss("cispo", ClipOptions, LossTraits(stops_gradient=True))
def cispo(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``; ``sg`` stops the gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585), eqs. 4 and 5. The paper has no lower bound
    (``clip_low = 1``) and tunes the upper one.
    """
    ratio = inputs.log_ratio().detach().exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    advantages = inputs.token_advantages()
    losses = -ratio.clamp(low, high) * advantages * inputs.zero_masked(inputs.log_probs)
    return losses, {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
