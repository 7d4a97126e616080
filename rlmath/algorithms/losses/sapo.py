"""A smooth gate in place of the clip."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, policy_loss
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.utils.lazy_torch import Tensor, torch


@policy_loss("sapo", aggregations=("seq_mean_token_mean",))
def sapo(inputs: LossInputs, settings: ObjectiveSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, with a ``tau`` for each sign of ``A``.

    SAPO (arXiv:2511.20347). At ``r = 1`` the gradient is that of ``-r A``; away
    from it the gradient fades instead of stopping, faster for negative advantages, whose pushes
    spread over all other tokens of the vocabulary.
    """
    advantages = inputs.token_advantages()
    # Not of two plain numbers: torch would make them float32 whatever the log-probs are.
    tau = torch.full_like(advantages, settings.sapo_tau_negative)
    tau = torch.where(advantages > 0, settings.sapo_tau_positive, tau)
    gate = torch.sigmoid(tau * (inputs.log_ratio().exp() - 1.0)) * (4.0 / tau)
    return -gate * advantages, {}
