"""Sequences that are pushed down although the policy has left them long ago."""

from __future__ import annotations

from rlmath.algorithms.losses import LossInputs
from rlmath.utils.lazy_torch import Tensor


def off_policy_keep(inputs: LossInputs, max_kl: float) -> Tensor:
    """``[r]`` bool: false for tokens of sequences that take no part in the policy loss.

    A sequence is left out when its advantage is negative and its mean of
    ``log(pi_engine / pi_current)`` is above ``max_kl`` nats. DeepSeek-V3.2 (arXiv:2512.02556),
    eq. 9, with the engine's log-probs as the sampling policy's, so that mismatch and staleness
    both count. Learning from one's own mistakes helps; learning from mistakes that one would not
    make any more only disturbs.

    Args:
        inputs: Tokens of a cut. Per-token advantages are judged token by token.
        max_kl: In nats per token.
    """
    gap = inputs.sequence_mean((inputs.engine_log_probs - inputs.log_probs).detach())
    return ~((inputs.token_advantages() < 0) & (gap > max_kl))
