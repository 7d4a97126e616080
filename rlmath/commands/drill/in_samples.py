"""Faults of samples, rewards and advantages in the driver, where one set of numbers is computed
once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlmath.commands.drill.fault import Fault, Scene, patch, scene_fault
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config
from rlmath.training.checks.own_advantages import ESTIMATORS

OWN = "check: advantages recomputed from rewards"
FOLLOW = "do not follow from their rewards"
OPPOSITE = "All have the opposite sign"
FAULTS: list[Fault] = []


def unknown_advantages(config: Config) -> str | None:
    """Why advantages cannot be computed again from rewards; ``None``: they can."""
    algorithm = config.algorithm
    if algorithm.advantage not in ESTIMATORS:
        return f"algorithm.advantage={algorithm.advantage}: rewards alone do not give advantages"
    if algorithm.distill_coef or (algorithm.kl_coef and algorithm.kl_in is KlPlace.reward):
        return "something is added to the advantage of each token"
    return None


@scene_fault(FAULTS, "negated_in_driver", OWN, OPPOSITE, missing=unknown_advantages)
def negate_advantages(scene: Scene) -> Any:
    """The driver's advantages have the opposite sign."""

    from rlmath.training import step_batch

    def negate(estimate: Any, *arguments: Any, **options: Any) -> Any:
        found = estimate(*arguments, **options)
        return dataclasses.replace(found, values=-found.values)

    return patch(step_batch, "sequence_advantages", negate)


@scene_fault(FAULTS, "next_group", OWN, FOLLOW, missing=unknown_advantages)
def in_next_group(scene: Scene) -> Any:
    """Each group's last sample counts in the next group."""

    from rlmath.training import step_batch

    def roll(estimate: Any, rewards: Any, groups: Any, *more: Any, **options: Any) -> Any:
        return estimate(rewards, groups.roll(1), *more, **options)

    return patch(step_batch, "sequence_advantages", roll)


@scene_fault(FAULTS, "moved_rewards", OWN, FOLLOW, missing=unknown_advantages)
def move_rewards(scene: Scene) -> Any:
    """Each sample has the reward of the one before it."""
    from rlmath.training import step_batch

    return patch(step_batch, "estimator_rewards", lambda of, *x: of(*x).roll(1, 0))


@scene_fault(FAULTS, "another_text", "check: a sample is graded again", "another text was graded")
def another_text(scene: Scene) -> Any:
    """Each sample has the grade of the next one's text."""
    from rlmath.rewards.mix import RewardMix

    def shift(original: Any, mix: Any, samples: Any, partials: Any) -> Any:
        return original(mix, samples, [*partials[1:], *partials[:1]])

    return patch(RewardMix, "grade", shift)


@scene_fault(FAULTS, "lost_end", "check: ends of responses", "the end-of-sequence token was lost")
def lost_ends(scene: Scene) -> Any:
    """Responses lose their end-of-sequence token."""
    from rlmath.rollout.pool import RolloutPool

    def generate(original: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for sample in original(*arguments, **options):
            ended = sample.finish_reason == "stop" and len(sample.token_ids) > 1
            tokens, log_probs = sample.token_ids[:-1], sample.log_probs[:-1]
            changed = {"token_ids": tokens, "log_probs": log_probs} if ended else {}
            yield dataclasses.replace(sample, **changed)

    return patch(RolloutPool, "generate", generate)


@scene_fault(
    FAULTS,
    "repeated_group",
    "invariant: samples are trained on once",
    "samples were trained on before",
    latest=2,
)
def repeated_group(scene: Scene) -> Any:
    """A step gets a group of the step before again."""
    from rlmath.training.group_source import GroupSource

    earlier: list[Any] = []

    def take(original: Any, source: Any, step: int) -> Any:
        found = original(source, step)
        groups = found.groups
        if groups and earlier:
            found = dataclasses.replace(found, groups=(earlier[-1], *groups[1:]))
        earlier.extend(groups[:1])
        return found

    return patch(GroupSource, "take", take)


def no_data_parallel(config: Config) -> str | None:
    """Why there are no two data-parallel ranks; ``None``: there are."""
    if (config.actor.data_parallel or 1) > 1:
        return None
    return "actor.data_parallel=1: there is one data-parallel rank"


@scene_fault(
    FAULTS,
    "rank_twice",
    "check: every sequence once",
    "were trained on more than once",
    missing=no_data_parallel,
)
def shard_of_another_rank(scene: Scene) -> Any:
    """A data-parallel rank trains the sequences of another."""
    from rlmath.actor import group

    def first_twice(original: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        first, *others = original(*arguments, **options)
        yield from (first, first, *others[1:])

    return patch(group, "shards", first_twice)
