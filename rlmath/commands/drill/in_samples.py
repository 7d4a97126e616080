"""Faults of samples, rewards and advantages in the driver, where one set of numbers is computed
once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from rlmath.commands.drill.fault import Fault, Scene, scene_fault
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config
from rlmath.training.checks.own_advantages import ESTIMATORS

OWN = "check: advantages recomputed from rewards"
FOLLOW = "do not follow from their rewards"
OPPOSITE = "All have the opposite sign"
FAULTS: list[Fault] = []


def in_batch(name: str, make: Callable[[Any], Any]) -> Any:
    """Put ``make(original)`` in the place of a function that ``StepBatch`` calls."""
    from rlmath.training import step_batch

    return mock.patch.object(step_batch, name, make(getattr(step_batch, name)))


def unknown_advantages(config: Config) -> str | None:
    """Why advantages cannot be computed again from rewards; ``None``: they can."""
    algorithm = config.algorithm
    if algorithm.advantage not in ESTIMATORS:
        return f"algorithm.advantage={algorithm.advantage}: rewards alone do not give advantages"
    if algorithm.distill_coef or (algorithm.kl_coef and algorithm.kl_in is KlPlace.reward):
        return "something is added to the advantage of each token"
    return None


@scene_fault(FAULTS, "negated_in_driver", OWN, OPPOSITE, missing=unknown_advantages)
def negated(scene: Scene) -> Any:
    """The driver's advantages have the opposite sign."""

    def make(estimate: Any) -> Any:
        def estimated(*arguments: Any, **options: Any) -> Any:
            found = estimate(*arguments, **options)
            return dataclasses.replace(found, values=-found.values)

        return estimated

    return in_batch("sequence_advantages", make)


@scene_fault(FAULTS, "next_group", OWN, FOLLOW, missing=unknown_advantages)
def in_next_group(scene: Scene) -> Any:
    """Each group's last sample counts in the next group."""

    def make(estimate: Any) -> Any:
        def estimated(rewards: Any, groups: Any, *arguments: Any, **options: Any) -> Any:
            return estimate(rewards, groups.roll(1), *arguments, **options)

        return estimated

    return in_batch("sequence_advantages", make)


@scene_fault(FAULTS, "moved_rewards", OWN, FOLLOW, missing=unknown_advantages)
def moved_on(scene: Scene) -> Any:
    """Each sample has the reward of the one before it."""
    return in_batch("estimator_rewards", lambda rewards_of: lambda *x: rewards_of(*x).roll(1, 0))


@scene_fault(FAULTS, "another_text", "check: a sample is graded again", "another text was graded")
@contextlib.contextmanager
def another_text(scene: Scene) -> Iterator[None]:
    """Each sample has the grade of the next one's text."""
    from rlmath.rewards.mix import RewardMix

    original = RewardMix.graded

    def graded(self: Any, samples: Any, partials: Any) -> Any:
        return original(self, samples, [*partials[1:], *partials[:1]])

    with mock.patch.object(RewardMix, "graded", graded):
        yield


@scene_fault(FAULTS, "lost_end", "check: ends of responses", "the end-of-sequence token was lost")
@contextlib.contextmanager
def lost_ends(scene: Scene) -> Iterator[None]:
    """Responses lose their end-of-sequence token."""
    from rlmath.rollout.pool import RolloutPool

    original = RolloutPool.generate

    def generate(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for sample in original(self, *arguments, **options):
            ended = sample.finish_reason == "stop" and len(sample.token_ids) > 1
            tokens, log_probs = sample.token_ids[:-1], sample.log_probs[:-1]
            changed = {"token_ids": tokens, "log_probs": log_probs} if ended else {}
            yield dataclasses.replace(sample, **changed)

    with mock.patch.object(RolloutPool, "generate", generate):
        yield


@scene_fault(
    FAULTS,
    "repeated_group",
    "invariant: samples are trained on once",
    "samples were trained on before",
    latest=2,
)
@contextlib.contextmanager
def repeated_group(scene: Scene) -> Iterator[None]:
    """A step gets a group of the step before again."""
    from rlmath.training.group_source import GroupSource

    original = GroupSource.take
    earlier: list[Any] = []

    def take(self: Any, step: int) -> Any:
        found = original(self, step)
        groups = found.groups
        if groups and earlier:
            found = dataclasses.replace(found, groups=(earlier[-1], *groups[1:]))
        earlier.extend(groups[:1])
        return found

    with mock.patch.object(GroupSource, "take", take):
        yield


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
@contextlib.contextmanager
def shard_of_another_rank(scene: Scene) -> Iterator[None]:
    """A data-parallel rank trains the sequences of another."""
    from rlmath.actor import group

    original = group.shards

    def first_twice(*arguments: Any, **options: Any) -> Iterator[Any]:
        first, *others = original(*arguments, **options)
        yield from (first, first, *others[1:])

    with mock.patch.object(group, "shards", first_twice):
        yield
