"""Group-relative advantages: z-scores of rewards within a prompt's samples."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.advantages.base import AdvantageTraits, EpsilonOptions, Groups, estimator
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import setting


@dataclass(frozen=True)
class GrpoOptions(EpsilonOptions):
    leave_one_out: bool = setting(
        False, "Use the mean of the group's other samples as the baseline."
    )
    leave_one_out_std: bool = setting(
        False,
        "Use the standard deviation of the group's other samples; where these are all equal, the "
        "difference from the baseline is not divided.",
    )


@estimator("grpo", GrpoOptions, AdvantageTraits(within_groups=True))
def grpo(groups: Groups, options: GrpoOptions) -> Tensor:
    """``(r - mean) / (std + epsilon)`` within each group.

    GRPO (arXiv:2402.03300), §4.1.2; Bessel's standard deviation (divided by n - 1). A group of one
    and a group of equal rewards get 0.

    With ``leave_one_out`` the baseline excludes the sample's own reward, which multiplies
    advantages by ``n / (n - 1)``. With ``leave_one_out_std`` the standard deviation excludes the
    sample too, as in NeMo RL (``nemo_rl/algorithms/utils.py``). Where the other samples are all
    equal, as for the only right answer of a group, the difference is not divided, because dividing
    by ``epsilon`` would give about a million.
    """
    if options.leave_one_out_std:
        std = groups.std_of_others()
        advantages = groups.center_rewards() / torch.where(std > 0, std + options.epsilon, 1.0)
    else:
        advantages = groups.center_rewards() / (groups.std() + options.epsilon)
    if options.leave_one_out:
        advantages = advantages * groups.sizes / (groups.sizes - 1).clamp(min=1)
    return advantages
