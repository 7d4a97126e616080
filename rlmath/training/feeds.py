"""The sampler and the feed that ``rollout.schedule`` asks for."""

from __future__ import annotations

from typing import Any

from rlmath.config.rollout import RolloutSchedule, max_lag
from rlmath.config.schema import Config
from rlmath.monitor import Monitor
from rlmath.rollout.continuous import ContinuousSampler
from rlmath.rollout.sampler import Sampler
from rlmath.training.continuous_feed import ContinuousFeed
from rlmath.training.controllers import Coefficients
from rlmath.training.feed import Feed, PipelinedFeed
from rlmath.training.log_probs_ahead import log_probs_ahead
from rlmath.training.passes_ahead import LOOK_EVERY_S
from rlmath.training.session import Session
from rlmath.training.update_ahead import update_ahead


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


def feed_of(
    session: Session, sampler: Sampler, monitor: Monitor, coefficients: Coefficients
) -> Feed:
    """A run's feed.

    Args:
        session: Its engines sample.
        sampler: From :func:`sampler_of`.
        monitor: Times it.
        coefficients: Of the run's steps.
    """
    if isinstance(sampler, ContinuousSampler):
        return ContinuousFeed(session, sampler, monitor)
    rollout = session.config.rollout
    if rollout.schedule is RolloutSchedule.pipelined and max_lag(rollout):
        return PipelinedFeed(session, sampler, monitor)
    feed = Feed(session, sampler, monitor)
    algorithm = session.config.algorithm
    if algorithm.overlap_log_probs:
        groups, reference = algorithm.overlap_log_probs, algorithm.kl_coef > 0
        actor = session.actor
        feed.ahead = log_probs_ahead(actor.begin_log_probs, groups, reference, actor.is_done)
    if algorithm.overlap_update:
        feed.ahead = update_ahead(session, coefficients)
    if feed.ahead is not None:
        sampler.on_decided, sampler.on_look = feed.ahead.see, feed.ahead.look
        session.sampling.pool.look_every_s = LOOK_EVERY_S
    return feed
