"""Whether log-probs can be computed while others are sampled (``algorithm.overlap_log_probs``)."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import RoutingReplay
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.cluster import Placement
from rlmath.config.rollout import max_lag
from rlmath.config.schema import Config, Device

KEY = "algorithm.overlap_log_probs"


def overlap_problems(config: Config, device: Device) -> Iterator[str]:
    """A message for each setting that leaves nothing to overlap, or makes it impossible."""
    algorithm, rollout = config.algorithm, config.rollout
    groups = algorithm.overlap_log_probs
    if not groups:
        return
    given = f"{KEY}={groups}"
    if device is Device.cuda and config.cluster.placement is Placement.colocated:
        yield (
            f"{given}: with cluster.placement=colocated engines have the actor's GPUs while they "
            "sample, and the actor cannot compute; take cluster.placement=separate, or 0"
        )
    if not needs_old_log_probs(algorithm):
        yield (
            f"{given}: there is no pass for the old log-probs with "
            f"algorithm.minibatches_per_step={algorithm.minibatches_per_step}, "
            f"algorithm.old_log_probs={algorithm.old_log_probs.name} and "
            f"algorithm.correction.kind={algorithm.correction.kind.name}; take 0"
        )
    if max_lag(rollout):
        yield (
            f"{given}: a step of rollout.schedule={rollout.schedule.name} does not train on all "
            "that is graded while it is sampled, or trains with newer weights; take "
            "rollout.schedule=synchronous, or 0"
        )
    if groups >= algorithm.prompts_per_step:
        yield (
            f"{given}: the algorithm.prompts_per_step={algorithm.prompts_per_step} groups of a "
            f"step would be one pass after all are sampled; take less than "
            f"{algorithm.prompts_per_step}, or 0"
        )
    if algorithm.filter.oversample > 1:
        yield (
            f"{given}: with algorithm.filter.oversample={algorithm.filter.oversample:g} groups are "
            "left to the next step, whose weights give them other log-probs; take oversample=1, "
            "which asks for another group where one is dropped, or 0"
        )
    if config.actor.routing_replay is not RoutingReplay.none:
        yield (
            f"{given}: actor.routing_replay={config.actor.routing_replay.name} records routes in "
            "the update's own micro-batches; take routing_replay=none, or 0"
        )
