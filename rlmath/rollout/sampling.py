"""Engines and rewards together: what a step and an evaluation sample with."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.rewards.mix import RewardMix
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool


@dataclass(frozen=True)
class Sampling:
    """What samples and grades.

    Attributes:
        pool: The engines, ready, and connected to the actor if there is one.
        rewards: The mix.
        collector: Grades what the pool samples, while it samples.
    """

    pool: RolloutPool
    rewards: RewardMix
    collector: Collector
