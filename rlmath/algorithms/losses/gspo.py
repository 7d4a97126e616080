"""The clipped surrogate with one importance ratio per sequence."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.algorithms.losses.clip import DualClipOptions, clip_ratio
from rlmath.utils.lazy_torch import Tensor


@policy_loss(
    "gspo",
    DualClipOptions,
    LossTraits(("seq_mean_token_mean", "seq_mean_token_sum"), of_sequences=True),
)
def gspo(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` for each token of a sequence.

    ``s = exp(mean over the sequence's tokens of log r)``, the geometric mean of token ratios, so
    bounds are much tighter than PPO's. GSPO (arXiv:2507.18071), eqs. 5 and 7. The gradient of each
    token's loss reaches all tokens of its sequence. With the aggregation ``seq_mean_token_mean``
    the sum is the paper's mean over sequences; with ``seq_mean_token_sum`` it is LUSPO
    (arXiv:2602.05261), which multiplies each sequence's term by its length. With ``dual_clip = c``
    the loss is at most ``-c A`` where ``A < 0``, as in ``ppo_clip``.
    """
    return clip_ratio(inputs, options, inputs.sequence_mean(inputs.log_ratio()).exp())
