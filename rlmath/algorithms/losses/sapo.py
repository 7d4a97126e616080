"""A smooth gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class SapoOptions(Options):
    tau_positive: float = setting(1.0, "Gate temperature for positive advantages.", above=0)
    tau_negative: float = setting(1.05, "Gate temperature for negative advantages.", above=0)


@policy_loss("sapo", SapoOptions, LossTraits(("seq_mean_token_mean",)))
def sapo(inputs: LossInputs, options: SapoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, with a ``tau`` for each sign of ``A``.

    SAPO (arXiv:2511.20347). At ``r = 1`` the gradient is that of ``-r A``; away from it the
    gradient fades instead of stopping, faster for negative advantages, whose pushes spread over all
    other tokens of the vocabulary.
    """
    advantages = inputs.token_advantages()
    # Two plain numbers would become float32, whatever the log-probs' dtype.
    tau = torch.full_like(advantages, options.tau_negative)
    tau = torch.where(advantages > 0, options.tau_positive, tau)
    gate = torch.sigmoid(tau * (inputs.log_ratio().exp() - 1.0)) * (4.0 / tau)
    return -gate * advantages, {}
