"""The off-policy mask: drops negative sequences that the policy no longer samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlmath.algorithms.losses import LossInputs
from rlmath.algorithms.totals import Totals
from rlmath.utils.lazy_torch import Tensor


def off_policy_keep(inputs: LossInputs, max_kl: float) -> Tensor:
    """``[r]`` bool: false for tokens of sequences excluded from the policy loss.

    A sequence is excluded if its advantage is negative and its mean of
    ``log(pi_engine / pi_current)`` is above ``max_kl`` nats. DeepSeek-V3.2 (arXiv:2512.02556),
    eq. 9, with the rollout log-probs as the sampling policy's, so mismatch and staleness both
    count. Learning from one's own mistakes helps; mistakes that the policy no longer makes only
    add noise.

    Args:
        inputs: Tokens of a micro-batch. Per-token advantages are judged token by token.
        max_kl: Limit in nats per token.
    """
    gap = inputs.sequence_mean((inputs.engine_log_probs - inputs.log_probs).detach())
    return ~((inputs.token_advantages() < 0) & (gap > max_kl))


@dataclass(frozen=True)
class OffPolicyTotals(Totals):
    tokens: int = 0  # Number of tokens in the loss.
    masked: int = 0  # How many of them were excluded.


def mask_share_by_lag(by_version: Mapping[int, OffPolicyTotals], now: int) -> dict[str, float]:
    """``lag_<n>/off_policy_masked``, the share of excluded tokens of each lag; empty if all tokens
    are of the newest weights.

    Args:
        now: The weights version before the update.
    """
    if not by_version.keys() - {now}:
        return {}
    return {
        f"lag_{now - version}/off_policy_masked": one.masked / max(one.tokens, 1)
        for version, one in sorted(by_version.items(), reverse=True)
    }
