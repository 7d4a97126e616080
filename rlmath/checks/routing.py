"""Whether routing replay has routes to replay."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import RoutingReplay
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.schema import Config
from rlmath.model.spec import ModelSpec


def routing_problems(config: Config) -> Iterator[str]:
    """A message where no pass would record routes."""
    replay, algorithm = config.actor.routing_replay, config.algorithm
    if replay is not RoutingReplay.old_log_probs or needs_old_log_probs(algorithm):
        return
    yield (
        f"actor.routing_replay={replay.name}: no pass for the old log-probs records routes with "
        f"algorithm.minibatches_per_step={algorithm.minibatches_per_step} and "
        f"algorithm.old_log_probs={algorithm.old_log_probs.name}; the first minibatch routes as "
        "the old policy anyway. Take minibatches_per_step of 2 or more with "
        "old_log_probs=recompute, or routing_replay=none"
    )


def routing_model(config: Config, model: ModelSpec) -> Iterator[str]:
    replay = config.actor.routing_replay
    if replay is not RoutingReplay.none and not model.experts:
        yield (
            f"actor.routing_replay={replay.name}: the model has no experts to route tokens to; "
            "set it to none"
        )
