"""Which groups make a log-prob pass while others are sampled: the same in any order."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from typing import Any

import pytest
import torch

from rlmath.actor.ahead import PassAhead, StepPass
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.rollout.collect import Collector
from rlmath.training.log_probs_ahead import log_probs_ahead
from rlmath.training.passes_ahead import PassesAhead
from rlmath.types import Group
from tests.unit.rollout import stand_ins
from tests.unit.rollout.test_sampler import Engines, sampler_of


class Ranks:
    """Notes what it is asked for: groups under way by then, and the tokens of each pass."""

    def __init__(self) -> None:
        self.passes: list[list[list[int]]] = []

    def begin(self, sequences: SampledSequences, reference: bool) -> PassAhead:
        count = len(sequences)
        batch = sequences.select(range(count))
        rows = batch.tokens.split(batch.sequence_lengths.tolist())
        self.passes.append([row.tolist() for row in rows])
        return PassAhead((torch.arange(count),), sequences.response_lengths, (), ())


FILTERED = ("filter.keep=variance", "filter.max_rounds=9")


def steps(collector: Collector, order_seed: int, groups_per_pass: int) -> Any:
    """Of three steps the groups, the passes, and how many of them began during the sampling."""
    ranks = Ranks()
    ahead = log_probs_ahead(ranks.begin, groups_per_pass, False)
    sampler = sampler_of(*FILTERED)
    sampler.on_decided = ahead.see
    found = []
    for step in (1, 2, 3):
        ahead.begin()
        engines: Any = Engines(order_seed * step)
        sampled = sampler.sample(step, engines, collector, contextlib.nullcontext)
        early = len(ranks.passes)
        made = ahead.take(sampled.groups)
        found.append((sampled.groups, made, early, ranks.passes))
        ranks.passes = []
    return found


def tokens_of(groups: tuple[Group, ...]) -> list[list[int]]:
    return [
        [*group.problem.prompt_token_ids, *one.sample.token_ids.tolist()]
        for group in groups
        for one in group.samples
    ]


@pytest.mark.parametrize("groups_per_pass", [1, 3])
def test_each_sample_is_in_one_pass_and_passes_do_not_depend_on_the_order(
    collector: Collector,
    groups_per_pass: int,
) -> None:
    runs = [steps(collector, order_seed, groups_per_pass) for order_seed in (1, 2, 3)]
    for step in zip(*runs, strict=True):
        for groups, made, _, passes in step:
            places = [one.places for one in made]
            assert sorted(p for one in places for p in one) == list(range(8))
            tokens = tokens_of(groups)
            assert sorted([tokens[p] for p in one] for one in places) == sorted(passes)
        assert len({tuple(one.places for one in made) for _, made, *_ in step}) == 1
    # That is, while others were sampled.
    assert any(early for run in runs for _, _, early, _ in run)


def test_the_last_pass_is_of_what_is_left() -> None:
    """What a shortage left from an earlier step, and groups that do not fill a pass."""
    from tests.unit.training.test_prepare import groups

    one, two = groups()
    ranks = Ranks()
    ahead = log_probs_ahead(ranks.begin, 2, False)
    ahead.see(1, None)
    assert ranks.passes == []
    ahead.see(0, two)
    assert len(ranks.passes) == 1
    found = ahead.take([one, two])
    assert [pass_.places for pass_ in found] == [(0, 1), (2, 3)]
    assert ranks.passes == [tokens_in([two]), tokens_in([one])]
    ahead.begin()
    assert ahead.take([]) == [] and len(ranks.passes) == 2
    # Dropped groups alone are none.
    for place in (0, 1):
        ahead.see(place, None)
    assert ahead.take([]) == [] and len(ranks.passes) == 2


def tokens_in(groups: list[Group]) -> list[list[int]]:
    return tokens_of(tuple(groups))


def test_masked_samples_are_computed_like_others() -> None:
    from tests.unit.training.test_prepare import groups

    given = groups()
    ranks = Ranks()
    ahead = log_probs_ahead(ranks.begin, 1, False)
    ahead.see(0, given[0])
    ahead.see(1, given[1])
    found: list[StepPass] = ahead.take(given)
    lengths = [x for one in found for x in one.made.response_lengths.tolist()]
    wanted = sampled_sequences(given, truncated="keep", mask_duplicates=False)  # type: ignore
    assert lengths == wanted.response_lengths.tolist()


def test_in_order_a_pass_waits_for_those_before_it() -> None:
    """Gradients are added in the order of admission, whoever is graded first."""
    from tests.unit.training.test_prepare import groups

    one, two = groups()
    for order in itertools.permutations(range(5)):
        begun: list[tuple[list[str], bool]] = []

        def begin(made: Any, is_first: bool, begun: Any = begun) -> PassAhead:
            begun.append(([group.problem.id for group in made], is_first))
            return PassAhead((), torch.zeros(0), (), ())

        ahead = PassesAhead(begin, 2, in_order=True)
        for again in range(2):
            seen: set[int] = set()
            ahead.begin()
            begun.clear()
            # Of three passes the first has a group, the second none, the third is not full.
            given = {0: None, 1: one, 2: None, 3: None, 4: two}
            for place in order:
                ahead.see(place, given[place])
                seen.add(place)
                assert bool(begun) == ({0, 1} <= seen)
            # What an earlier step left comes last, though it is first in the step.
            left = dataclasses.replace(one, problem=dataclasses.replace(one.problem, id="left"))
            found = ahead.take([left, one, two])
            assert begun == [(["p0"], True), (["p1"], False), (["left"], False)], again
            assert [pass_.places for pass_ in found] == [(2, 3), (4, 5), (0, 1)]


def test_after_another_schedule_no_pass_begins_before_the_step_is_known(
    collector: Collector,
) -> None:
    """Groups that it left unfinished, and those that it kept, may be more than a step takes."""
    more = 0
    for steps_before in range(1, 9):
        carries = stand_ins.sampler_of(
            *("rollout.schedule=carry_over", "rollout.carry_over_tokens=8", "rollout.max_lag=2")
        )
        for step in range(1, steps_before + 1):
            engines: Any = stand_ins.Engines(step, step - 1, 0.5)
            carries.sample(step, engines, collector, contextlib.nullcontext)
        state = carries.state_dict()
        unfinished = len(state["live"])
        synchronous = stand_ins.sampler_of()
        synchronous.load_state_dict(state)
        ranks = Ranks()
        ahead = log_probs_ahead(ranks.begin, 2, False)
        synchronous.on_decided = ahead.see
        for step in (steps_before + 1, steps_before + 2):
            ahead.begin()
            engines = stand_ins.Engines(step, step - 1, 0.5)
            found = synchronous.sample(step, engines, collector, contextlib.nullcontext)
            made = ahead.take(found.groups)
            places = sorted(place for one in made for place in one.places)
            assert places == list(range(sum(len(one.samples) for one in found.groups)))
        more += unfinished > 4
    assert more


@pytest.mark.parametrize("in_order", [False, True])
def test_the_ranks_have_few_passes_at_a_time(in_order: bool) -> None:
    """What is asked of them meanwhile, as the save of a run that is interrupted, waits for these
    alone."""
    from tests.unit.training.test_prepare import groups

    given = [
        dataclasses.replace(group, problem=dataclasses.replace(group.problem, id=f"p{number}"))
        for number, group in zip(range(6), itertools.cycle(groups()))
    ]
    begun: list[str] = []
    done: set[int] = set()

    def begin(made: Any, is_first: bool) -> Any:
        assert is_first == (not begun)
        begun.extend(group.problem.id for group in made)
        return len(begun)

    ahead = PassesAhead(begin, 1, in_order=in_order, is_done=lambda made: made in done)
    for _ in range(2):
        begun.clear()
        done.clear()
        ahead.begin()
        for place, group in enumerate(given[:5]):
            ahead.see(place, group)
        assert begun == ["p0", "p1"]
        ahead.look()
        assert begun == ["p0", "p1"]
        done.add(2)
        ahead.look()
        assert begun == ["p0", "p1", "p2"]
        done |= {1, 3}
        ahead.see(5, None)
        assert begun == ["p0", "p1", "p2", "p3", "p4"]
        done.clear()
        # When all is sampled, all of them are asked for.
        ahead.see(6, given[5])
        assert begun[-1] == "p4"
        found = ahead.take(given)
        assert begun == [group.problem.id for group in given]
        assert [one.places for one in found] == [(2 * i, 2 * i + 1) for i in range(6)]


def test_a_sampler_looks_while_engines_sample_and_while_grades_are_waited_for() -> None:
    looks: list[str] = []
    may_grade = threading.Event()

    def slow(completions: list[str], **_: Any) -> list[float]:
        assert may_grade.wait(20)
        return [1.0] * len(completions)

    def look() -> None:
        looks.append("")
        if len(looks) > sampled_looks + 2:
            may_grade.set()

    sampled_looks = 1000
    slow.thread_safe = True  # type: ignore[attr-defined]
    sampler = sampler_of()
    sampler.on_look = look

    class Counted(Engines):
        def generate(self, requests: Any, more: Any, journal: Any) -> Any:
            nonlocal sampled_looks
            for one in super().generate(requests, more, journal):
                yield one
                sampled_looks = len(looks)

    with RewardMix([MixItem(FunctionReward(slow, "slow"), "slow")]) as mix:
        own = Collector(mix, 2)
        sampler.sample(1, Counted(1), own, contextlib.nullcontext)  # type: ignore[arg-type]
        own.close()
    assert may_grade.is_set()
