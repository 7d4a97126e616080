"""The sampler and the feed that ``rollout.schedule`` asks for."""

from __future__ import annotations

from typing import Any

from rlmath.config.rollout import RolloutSchedule, max_lag
from rlmath.config.schema import Config
from rlmath.monitor import Monitor
from rlmath.rollout.continuous import ContinuousSampler
from rlmath.rollout.sampler import Sampler
from rlmath.training.continuous_feed import ContinuousFeed
from rlmath.training.feed import Feed, PipelinedFeed
from rlmath.training.session import Session


def sampler_of(config: Config, *parts: Any) -> Sampler:
    """A run's sampler.

    Args:
        config: Checked settings.
        parts: As ``Sampler`` takes them.
    """
    schedule = config.rollout.schedule
    if schedule is RolloutSchedule.continuous and max_lag(config.rollout):
        return ContinuousSampler(config, *parts)
    return Sampler(config, *parts)


def feed_of(session: Session, sampler: Sampler, monitor: Monitor) -> Feed:
    """A run's feed.

    Args:
        session: Its engines sample.
        sampler: From :func:`sampler_of`.
        monitor: Times it.
    """
    if isinstance(sampler, ContinuousSampler):
        return ContinuousFeed(session, sampler, monitor)
    rollout = session.config.rollout
    if rollout.schedule is RolloutSchedule.pipelined and max_lag(rollout):
        return PipelinedFeed(session, sampler, monitor)
    return Feed(session, sampler, monitor)
