"""The components with which a step or an evaluation samples: engines and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.rewards.mix import RewardMix
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool


@dataclass(frozen=True)
class Sampling:
    pool: RolloutPool  # The engines, ready, and connected to the actor if there is one.
    rewards: RewardMix  # The reward mix.
    collector: Collector  # Grades the pool's samples while others are sampled.
