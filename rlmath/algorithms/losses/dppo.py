"""A trust region on the divergence of a token's distribution instead of its ratio."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlmath.algorithms.losses.base import LossInputs, policy_loss
from rlmath.algorithms.losses.clip import dual_clip_setting, dual_clipped
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


class Divergence(Enum):
    tv = "tv"
    kl = "kl"


@dataclass(frozen=True)
class DppoOptions(Options):
    divergence: Divergence = setting(
        Divergence.tv, "Divergence that is bounded, total variation (tv) or KL (kl)."
    )
    threshold: float | None = setting(
        None,
        "Maximum divergence of a token whose update would increase it; null: 0.15 (tv) or 0.05 "
        "nats (kl).",
        above=0,
    )
    dual_clip: float | None = dual_clip_setting()

    @property
    def limit(self) -> float:
        """``threshold``, or the divergence's own default."""
        if self.threshold is not None:
            return self.threshold
        return {Divergence.tv: 0.15, Divergence.kl: 0.05}[self.divergence]


@policy_loss("dppo", DppoOptions)
def dppo(inputs: LossInputs, options: DppoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-M r A``; ``M`` is 0 for tokens that are too far from the old policy and moving away.

    A token moves away if ``r > 1`` with a positive or ``r < 1`` with a negative advantage. The
    divergence is that of the binary choice between the sampled token and all others, with ``p``
    the current and ``q`` the old probability:

        tv: |p - q|
        kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    DPPO (arXiv:2602.04879), binary approximations: a ratio of 2 is negligible for a token of
    probability 1e-4 and large for one of 0.4, which a clip of the ratio cannot distinguish. With
    ``dual_clip = c`` the loss is at most ``-c A`` where ``A < 0``.
    """
    log_ratio = inputs.log_ratio()
    advantages = inputs.token_advantages()
    with torch.no_grad():
        p = inputs.zero_masked(inputs.log_probs).double()
        q = inputs.zero_masked(inputs.old_log_probs).double()
        divergence = (p.exp() - q.exp()).abs() if options.divergence is Divergence.tv else _kl(p, q)
        away = (log_ratio * advantages) > 0
        masked = away & (divergence > options.limit)
    ratio = log_ratio.exp()
    flags = {
        "clip_fraction_low": masked & (advantages < 0),
        "clip_fraction_high": masked & (advantages > 0),
    }
    losses, flags = dual_clipped(-ratio * advantages, advantages, ratio, options.dual_clip, flags)
    return torch.where(masked, 0.0, losses), flags


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # log(1 - p); rounding may give a log-prob of 0 or above.
    other_p = torch.log(-torch.expm1(log_p.clamp(max=-1e-12)))
    other_q = torch.log(-torch.expm1(log_q.clamp(max=-1e-12)))
    return log_q.exp() * (log_q - log_p) + other_q.exp() * (other_q - other_p)
