"""The components with which a step or an evaluation samples: engines and rewards."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.rewards.mix import RewardMix
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool


@dataclass(frozen=True)
class Sampling:
    """Components that sample and grade.

    Attributes:
        pool: The engines, ready, and connected to the actor if there is one.
        rewards: The reward mix.
        collector: Grades the pool's samples while others are sampled.
    """

    pool: RolloutPool
    rewards: RewardMix
    collector: Collector
