"""From the rewards of a batch's sequences to an advantage for each response token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.algorithms.advantages.base import ADVANTAGES, Groups
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.utils.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class AdvantageSettings:
    """The estimator and what it reads.

    Attributes:
        name: See the package's registry.
        leave_one_out: Of ``grpo``.
        leave_one_out_std: Of ``grpo``.
        epsilon: Added to the deviation by which the estimator, or the whitening, divides.
        whiten_tokens: Whiten over the tokens of the loss what any estimator gives.
        pass_at_k: The ``k`` of ``pass_at_k``.
        reward_weights: For ``gdpo``: the rewards that are normalised on their own, by name, with
            their weights.
    """

    name: str = "grpo"
    leave_one_out: bool = False
    leave_one_out_std: bool = False
    epsilon: float = 1e-6
    whiten_tokens: bool = False
    pass_at_k: int = 4
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Arguments of the estimator besides rewards and groups."""
        options: dict[str, Any] = {}
        if self.name not in _UNSCALED:
            options["epsilon"] = self.epsilon
        if self.name == "grpo":
            options["leave_one_out"] = self.leave_one_out
            options["leave_one_out_std"] = self.leave_one_out_std
        if self.name == "pass_at_k":
            options["k"] = self.pass_at_k
        if self.name == "gdpo" and self.reward_weights:
            options["weights"] = list(self.reward_weights.values())
        return options


# Estimators that divide by nothing.
_UNSCALED = ("dr_grpo", "rloo")


# What the estimators that whiten over tokens whiten: a penalty per token belongs before that.
_BEFORE_WHITENING: dict[str, Callable[[Groups], Tensor]] = {
    "reinforce_pp": lambda groups: groups.rewards,
    "reinforce_pp_baseline": lambda groups: groups.centered(),
}


def token_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_lengths: Tensor,
    mask: Tensor,
    settings: AdvantageSettings,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """The advantage of each response token of a whole batch, before it is cut.

    Args:
        rewards: ``[N]``, not-a-number where unscored; ``[N, K]`` for ``gdpo`` with ``K`` rewards.
        group_ids: ``[N]`` int64.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        mask: ``[R]`` bool, tokens that take part in the loss.
        settings: The estimator.
        token_rewards: ``[R]`` what is added to each token's return (a KL penalty, see
            ``kl_control.kl_in_reward``): before the whitening of ``reinforce_pp`` and
            ``reinforce_pp_baseline``, as REINFORCE++ (arXiv:2501.03262) has it, and to the
            advantage of the others, before ``whiten_tokens``.

    Returns:
        ``[R]`` float32.
    """
    n = response_lengths.numel()
    ids = torch.repeat_interleave(torch.arange(n, device=mask.device), response_lengths)
    if token_rewards is not None and settings.name in _BEFORE_WHITENING:
        raw = _BEFORE_WHITENING[settings.name](Groups(rewards, group_ids))
        return whiten(raw[ids] + token_rewards.double(), mask, settings.epsilon).float()
    counts = torch.zeros(n, dtype=torch.int64, device=mask.device).index_add_(0, ids, mask.long())
    estimate = ADVANTAGES.get(settings.name)
    advantages = estimate(rewards, group_ids, token_counts=counts, **settings.options())[ids]
    if token_rewards is not None:
        advantages = advantages + torch.where(mask, token_rewards, 0.0)
    if settings.whiten_tokens:
        advantages = whiten(advantages.double(), mask, settings.epsilon)
    return advantages.float()
