"""Batch of a step: all that its update reads, besides the weights and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlmath.algorithms.advantages import ADVANTAGES, SequenceAdvantages, sequence_advantages
from rlmath.batching.from_groups import SampleRewards, estimator_rewards, sampled_sequences
from rlmath.batching.shards import Sequences
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.monitor.digests import sample_key
from rlmath.rewards.mix import RewardMix
from rlmath.training.algorithm_settings import advantage_settings
from rlmath.types import Group


@dataclass(frozen=True)
class StepBatch:
    sequences: Sequences  # N, to shard over the ranks.
    keys: tuple[str, ...]  # PROBLEM/INDEX of each.
    takes_part: Tensor  # [N] bool, whether the sequence is in the loss.
    rewards: SampleRewards  # Rewards of each sequence.
    weights_version: int  # Version of the actor's weights before the update.

    def __len__(self) -> int:
        return len(self.keys)

    def advantages(self, config: Config) -> SequenceAdvantages:
        """Advantages of the sequences, from rewards alone."""
        settings = advantage_settings(config, self.rewards.weights)
        return sequence_advantages(
            estimator_rewards(self.rewards, settings),
            self.sequences.group_ids,
            self.sequences.loss_token_counts,
            settings,
            token_rewards=config.algorithm.kl_in is KlPlace.reward,
        )

    @classmethod
    def of(
        cls,
        algorithm: AlgorithmConfig,
        groups: Sequence[Group],
        rewards: RewardMix,
        weights_version: int,
        teacher_log_probs: Sequence[NDArray[np.float32]] | None = None,
    ) -> StepBatch:
        """All samples of the groups, at least one.

        Args:
            weights_version: Version of the actor's weights before the update.
            teacher_log_probs: Teacher's log-probs of each sample's tokens; ``None``: no teacher.
        """
        sequences = sampled_sequences(
            groups,
            truncated=algorithm.truncated,
            mask_duplicates=algorithm.filter.mask_duplicates,
            reads_rewards=ADVANTAGES.traits(algorithm.advantage).reads_rewards,
            teacher_log_probs=teacher_log_probs,
        )
        weights = {item.label: item.weight for item in rewards.items}
        return cls(
            sequences,
            tuple(sample_key(one) for one in sequences.samples),
            sequences.takes_part,
            SampleRewards.of(groups, weights),
            weights_version,
        )
