"""Whether passes can be made while others are sampled (``algorithm.overlap_log_probs``,
``algorithm.overlap_update``)."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.algorithms.advantages import WITHIN_GROUPS
from rlmath.algorithms.correction import CorrectionKind
from rlmath.config.actor import RoutingReplay
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.cluster import Placement
from rlmath.config.rollout import max_lag
from rlmath.config.schema import Config, Device

LOG_PROBS, UPDATE = "algorithm.overlap_log_probs", "algorithm.overlap_update"


def overlap_problems(config: Config, device: Device) -> Iterator[str]:
    """A message for each setting that leaves nothing to overlap, or makes it impossible."""
    algorithm = config.algorithm
    for key, groups in (
        (LOG_PROBS, algorithm.overlap_log_probs),
        (UPDATE, algorithm.overlap_update),
    ):
        if groups:
            yield from (f"{key}={groups}: {one}" for one in _of_sampling(config, device, groups))
    if groups := algorithm.overlap_log_probs:
        yield from (f"{LOG_PROBS}={groups}: {one}" for one in _of_log_probs(config))
    if groups := algorithm.overlap_update:
        yield from (f"{UPDATE}={groups}: {one}" for one in _of_update(config))


def _of_sampling(config: Config, device: Device, groups: int) -> Iterator[str]:
    """What either kind of pass cannot be made with."""
    algorithm, rollout = config.algorithm, config.rollout
    if device is Device.cuda and config.cluster.placement is Placement.colocated:
        yield (
            "with cluster.placement=colocated engines have the actor's GPUs while they "
            "sample, and the actor cannot compute; use cluster.placement=separate, or 0"
        )
    if max_lag(rollout):
        yield (
            f"a step of rollout.schedule={rollout.schedule.name} does not train on all "
            "that is graded while it is sampled, or trains with newer weights; use "
            "rollout.schedule=synchronous, or 0"
        )
    if groups >= algorithm.prompts_per_step:
        yield (
            f"the algorithm.prompts_per_step={algorithm.prompts_per_step} groups of a "
            f"step would be one pass after all are sampled; use less than "
            f"{algorithm.prompts_per_step}, or 0"
        )
    if algorithm.filter.oversample > 1:
        yield (
            f"with algorithm.filter.oversample={algorithm.filter.oversample:g} groups are "
            "left to the next step, whose weights give them other log-probs; use oversample=1, "
            "which asks for another group where one is dropped, or 0"
        )
    if config.actor.routing_replay is not RoutingReplay.none:
        yield (
            f"actor.routing_replay={config.actor.routing_replay.name} records routes in "
            "the update's own micro-batches; use routing_replay=none, or 0"
        )


def _of_log_probs(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if not needs_old_log_probs(algorithm):
        yield (
            f"there is no pass for the old log-probs with "
            f"algorithm.minibatches_per_step={algorithm.minibatches_per_step}, "
            f"algorithm.old_log_probs={algorithm.old_log_probs.name} and "
            f"algorithm.correction.kind={algorithm.correction.kind.name}; use 0"
        )
    if algorithm.overlap_update:
        yield (
            f"{UPDATE}={algorithm.overlap_update} makes the pass for the old log-probs, where one "
            "is needed, with its own; use 0"
        )


def _of_update(config: Config) -> Iterator[str]:
    """What a group's gradient would need of groups that are not sampled yet."""
    algorithm = config.algorithm
    if algorithm.minibatches_per_step > 1:
        yield (
            f"with algorithm.minibatches_per_step={algorithm.minibatches_per_step} the weights "
            "change before a step's last minibatches, and which groups these have is known when "
            f"all are sampled; use minibatches_per_step=1, or {LOG_PROBS}"
        )
    if config.actor.overlap_gradients:
        yield (
            "actor.overlap_gradients=true would hide the sum over data-parallel ranks behind the "
            "last micro-batch, and comes here after all parts; use overlap_gradients=false, or 0"
        )
    if algorithm.advantage not in WITHIN_GROUPS:
        yield (
            f"algorithm.advantage={algorithm.advantage} needs more than a group's own rewards; "
            f"use one of {', '.join(WITHIN_GROUPS)}, or 0"
        )
    if algorithm.whiten_tokens:
        yield "algorithm.whiten_tokens=true is over all tokens of the step; use false, or 0"
    if algorithm.entropy_top_share < 1:
        yield (
            f"algorithm.entropy_top_share={algorithm.entropy_top_share:g} is a share of all tokens "
            "of the step; use 1, or 0"
        )
    if algorithm.entropy_target is not None:
        yield (
            f"algorithm.entropy_target={algorithm.entropy_target:g} sets the step's entropy_coef "
            "by the entropy of all its tokens; use null, or 0"
        )
    if algorithm.correction.kind is CorrectionKind.auto:
        yield (
            "algorithm.correction.kind=auto chooses by all tokens of the step; use a kind, such "
            "as token_truncate, or 0"
        )
    if algorithm.distill_coef > 0:
        yield (
            f"algorithm.distill_coef={algorithm.distill_coef:g}: what a teacher says of a group "
            f"is not known when the group is graded; use 0, or {LOG_PROBS}"
        )
