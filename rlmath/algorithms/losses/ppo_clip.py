"""PPO's clipped surrogate, with separate bounds and an optional dual clip."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, policy_loss
from rlmath.algorithms.losses.clip import DualClipOptions, clip_ratio
from rlmath.utils.lazy_torch import Tensor


@policy_loss("ppo_clip", DualClipOptions)
def ppo_clip(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r`` the token's ratio.

    PPO (arXiv:1707.06347), eq. 7; separate bounds ("clip-higher") from DAPO (arXiv:2503.14476),
    eq. 8 and §3.1. With ``dual_clip = c`` the loss of a token with ``A < 0`` is at most ``-c A``
    (dual clip, arXiv:1912.09729), which is equivalent to capping its ratio at ``c``: the two-sided
    clip of INTELLECT-2 (arXiv:2505.07291).
    """
    return clip_ratio(inputs, options, inputs.log_ratio().exp())
