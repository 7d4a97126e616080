"""GSPO for advantages that differ between tokens."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.algorithms.losses.clip import DualClipOptions, clip_ratio
from rlmath.utils.lazy_torch import Tensor


@policy_loss(
    "gspo_token", DualClipOptions, LossTraits(("seq_mean_token_mean",), stops_gradient=True)
)
def gspo_token(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's loss with the ratio ``s_t = sg(s) pi_t / sg(pi_t)``; ``sg`` stops the gradient.

    The value is GSPO's; the gradient of a token's loss reaches only that token's log-prob, so
    tokens may have different advantages. GSPO (arXiv:2507.18071), eqs. 13 and 14. With the same
    advantage and weight for all tokens of a sequence the gradient equals that of ``gspo``.
    """
    sequence = inputs.sequence_mean(inputs.log_ratio()).detach().exp()
    own = inputs.zero_masked(inputs.log_probs)
    return clip_ratio(inputs, options, sequence * (own - own.detach()).exp())
