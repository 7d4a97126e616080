"""Advantages of each response token from the rewards of a batch's sequences."""

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
    """The estimator and its options."""

    name: str = "grpo"  # Registered name of the estimator.
    options: Options | None = None  # The estimator's options; None: its defaults.
    # Whiten the advantages of any estimator over the tokens of the loss.
    whiten_tokens: bool = False
    whiten_epsilon: float = 1e-6  # Added to the standard deviation of that whitening.
    # For gdpo: the separately normalized rewards, by name, with their weights.
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def estimator_options(self) -> Any:
        """The options, or the estimator's defaults."""
        return ADVANTAGES.options(self.name)() if self.options is None else self.options


@dataclass(frozen=True)
class SequenceAdvantages:
    """Advantages of sequences from rewards alone, before per-token terms."""

    values: Tensor  # [N] float, one value for all response tokens of a sequence.
    # Added to the standard deviation when whitening over the tokens of the loss, after token
    # rewards are added; None: no whitening.
    whiten_epsilon: float | None = None

    def select(self, rows: Tensor) -> SequenceAdvantages:
        """The advantages of a subset of sequences."""
        return SequenceAdvantages(self.values[rows], self.whiten_epsilon)


def sequence_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    token_counts: Tensor,
    settings: AdvantageSettings,
    *,
    token_rewards: bool = False,
) -> SequenceAdvantages:
    """Advantages of a step's sequences.

    Args:
        rewards: ``[N]``, NaN where unscored; ``[N, K]`` for ``gdpo`` with ``K`` rewards.
        group_ids: ``[N]`` int64.
        token_counts: ``[N]`` response tokens in the loss.
        settings: The estimator.
        token_rewards: Whether a term is added to each token's return (a KL penalty, see
            ``kl_control.kl_in_reward``). It is added before the whitening of estimators that
            whiten over tokens, as in REINFORCE++ (arXiv:2501.03262), and to the advantage of the
            others, before ``whiten_tokens``.
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
    """Advantage of each response token of some of a step's sequences.

    Args:
        sequences: Advantages of the same sequences.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        mask: ``[R]`` bool, tokens in the loss.
        token_rewards: ``[R]`` terms added to each token's return.
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
