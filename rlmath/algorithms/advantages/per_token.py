"""From the rewards of a batch's sequences to an advantage for each response token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmath.algorithms.advantages.base import ADVANTAGES, Advantage, Groups
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.algorithms.peers import ALONE, Peers
from rlmath.algorithms.ragged import repeat
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


@dataclass(frozen=True)
class SequenceAdvantages:
    """What rewards alone say, by sequence, before any term of single tokens.

    Attributes:
        values: ``[N]`` float, one for all response tokens of a sequence.
        whiten_epsilon: Whiten over the tokens of the loss, once token rewards are in, with this
            added to the deviation; ``None``: do not.
    """

    values: Tensor
    whiten_epsilon: float | None = None

    def select(self, rows: Tensor) -> SequenceAdvantages:
        """Those of some sequences."""
        return SequenceAdvantages(self.values[rows], self.whiten_epsilon)


def sequence_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    token_counts: Tensor,
    settings: AdvantageSettings,
    *,
    token_rewards: bool = False,
) -> SequenceAdvantages:
    """The advantages of a step's sequences.

    Args:
        rewards: ``[N]``, not-a-number where unscored; ``[N, K]`` for ``gdpo`` with ``K`` rewards.
        group_ids: ``[N]`` int64.
        token_counts: ``[N]`` response tokens that take part in the loss.
        settings: The estimator.
        token_rewards: Something is added to each token's return (a KL penalty, see
            ``kl_control.kl_in_reward``): before the whitening of estimators that whiten over
            tokens, as REINFORCE++ (arXiv:2501.03262) has it, and to the advantage of the others,
            before ``whiten_tokens``.
    """
    options, traits = settings.estimator_options, ADVANTAGES.traits(settings.name)
    if token_rewards and traits.before_whitening is not None:
        raw = traits.before_whitening(Groups(rewards, group_ids))
        return SequenceAdvantages(raw, options.epsilon)
    weights: dict[str, Any] = {}
    if traits.each_reward:
        weights["weights"] = list(settings.reward_weights.values()) or None
    estimate: Advantage = ADVANTAGES.get(settings.name)
    values = estimate(rewards, group_ids, options, token_counts=token_counts, **weights)
    return SequenceAdvantages(values, settings.whiten_epsilon if settings.whiten_tokens else None)


def token_advantages(
    sequences: SequenceAdvantages,
    response_lengths: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    peers: Peers = ALONE,
) -> Tensor:
    """The advantage of each response token of some of a step's sequences.

    Args:
        sequences: Of the same sequences.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        mask: ``[R]`` bool, tokens that take part in the loss.
        token_rewards: ``[R]`` what is added to each token's return.
        peers: The ranks with the step's other sequences.

    Returns:
        ``[R]`` float32.
    """
    advantages = repeat(sequences.values, response_lengths)
    if token_rewards is not None:
        advantages = advantages + torch.where(mask, token_rewards, 0.0)
    if sequences.whiten_epsilon is not None:
        advantages = whiten(advantages.double(), mask, sequences.whiten_epsilon, peers)
    return advantages.float()
