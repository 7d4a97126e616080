"""From the rewards of a batch's sequences to an advantage for each response token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.algorithms.advantages.base import ADVANTAGES, Groups
from rlmath.algorithms.advantages.gdpo import gdpo
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options


@dataclass(frozen=True)
class AdvantageSettings:
    """The estimator and what it reads.

    Attributes:
        name: See the package's registry.
        options: Of the estimator; ``None``: its defaults.
        whiten_tokens: Whiten over the tokens of the loss what any estimator gives.
        whiten_epsilon: Added to the deviation by which that divides.
        reward_weights: For ``gdpo``: the rewards that are normalized on their own, by name, with
            their weights.
    """

    name: str = "grpo"
    options: Options | None = None
    whiten_tokens: bool = False
    whiten_epsilon: float = 1e-6
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def estimator_options(self) -> Any:
        """The options, or the estimator's defaults."""
        return ADVANTAGES.options(self.name)() if self.options is None else self.options


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
        epsilon = settings.estimator_options.epsilon
        return whiten(raw[ids] + token_rewards.double(), mask, epsilon).float()
    counts = torch.zeros(n, dtype=torch.int64, device=mask.device).index_add_(0, ids, mask.long())
    options = settings.estimator_options
    if settings.name == "gdpo":
        weights = list(settings.reward_weights.values()) or None
        estimates = gdpo(rewards, group_ids, options, weights=weights)
    else:
        estimate = ADVANTAGES.get(settings.name)
        estimates = estimate(rewards, group_ids, options, token_counts=counts)
    advantages = estimates[ids]
    if token_rewards is not None:
        advantages = advantages + torch.where(mask, token_rewards, 0.0)
    if settings.whiten_tokens:
        advantages = whiten(advantages.double(), mask, settings.whiten_epsilon)
    return advantages.float()
