"""The plain policy gradient."""

from __future__ import annotations

from rlmath.algorithms.losses.base import LossInputs, LossTraits, policy_loss
from rlmath.utils.lazy_torch import Tensor
from rlmath.utils.setting import Options


@policy_loss("reinforce", Options, LossTraits(bounds_ratio=False))
def reinforce(inputs: LossInputs, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """``-A log pi``: REINFORCE (Williams 1992, doi:10.1007/BF00992696), eq. 11.

    No importance ratio and no clip, so only valid on policy, with one minibatch per step.
    """
    return -inputs.token_advantages() * inputs.zero_masked(inputs.log_probs), {}
