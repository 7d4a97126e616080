"""Random schedules under the virtual clock: the real sampler, assignment, filters and ledger.

Engines are fakes of random speeds and capacities, lengths are adversarial, and grades
come late and in any order. The sampler and the ledger stop when a group is lost,
counted twice or too old; what else has to hold is asserted here.
"""

import contextlib
import dataclasses
import random
from typing import Any

import pytest

from benchmarks.simulation.simulate import InstantGrades, sample_openly
from benchmarks.simulation.virtual_engines import VirtualPool
from rlmath.config.load import load
from rlmath.config.rollout import KvAtSync, RolloutSchedule, overlap_of
from rlmath.data import ProblemStream
from rlmath.engines.requests import Request
from rlmath.rollout.ledger import Event
from rlmath.rollout.sampler import Sampler
from rlmath.types import GradedSample, Problem

FAST_SCHEDULES, SCHEDULES, LONG_SCHEDULES = 50, 400, 100_000
STEPS = 6
BASE = load(["model.path=m", "runner.run_dir=r"])


class LateGrades(InstantGrades):
    """In place of the collector: grades follow from seeds, and come when they are drawn to."""

    def __init__(self, draw, spread):
        self._draw, self._spread = draw, spread

    def add(self, sample):
        assert sample.index not in {s.index for s in self._samples[sample.problem_id]}, "twice"
        super().add(sample)

    def grade(self, sample):
        own = random.Random(sample.seed)
        if own.random() < self._spread / 10:
            return GradedSample(sample, None, None, "error")
        correct = own.random() < self._spread
        return GradedSample(sample, float(correct), correct, "correct" if correct else "wrong")

    def take_finished(self, block=False, meanwhile=None):
        self._draw.shuffle(self._done)
        count = self._draw.randint(int(block and bool(self._done)), len(self._done))
        done, self._done = self._done[:count], self._done[count:]
        return done


def config_of(draw):
    """A schedule, sizes and a filter."""
    schedule = draw.choice(list(RolloutSchedule))
    carries_over = schedule is RolloutSchedule.carry_over
    filtered = draw.random() < 0.5
    rules = dataclasses.replace(
        BASE.algorithm.filter,
        keep="variance" if filtered else BASE.algorithm.filter.keep,
        max_rounds=draw.choice([1, 2, 10]) if filtered else 1,
        oversample=draw.choice([1.0, 1.5, 3.0])
        if filtered and schedule in (RolloutSchedule.synchronous, RolloutSchedule.carry_over)
        else 1.0,
    )
    return dataclasses.replace(
        BASE,
        rollout=dataclasses.replace(
            BASE.rollout,
            schedule=schedule,
            cut_after_tokens=draw.choice([1, 5, 20, 100]) if carries_over else None,
            max_lag=draw.choice([None, 0])
            if schedule in (RolloutSchedule.synchronous, RolloutSchedule.pipelined)
            else draw.randint(0, 5),
            kv=draw.choice(list(KvAtSync))
            if schedule is RolloutSchedule.continuous
            else KvAtSync.recompute,
            max_response_tokens=100,
        ),
        algorithm=dataclasses.replace(
            BASE.algorithm,
            prompts_per_step=draw.randint(1, 5),
            group_size=draw.randint(1, 3),
            filter=rules,
        ),
        runner=dataclasses.replace(BASE.runner, seed=draw.randrange(1000), steps=STEPS),
    )


def lengths_of(draw):
    """Length of each sample by its seed, in tokens."""
    shortest, longest, share = draw.choice(
        [(1, 1, 1.0), (1, 100, 0.05), (1, 100, 0.5), (100, 100, 1.0), (99, 100, 0.5), (1, 7, 0.9)]
    )

    def length(request):
        own = random.Random(request.seed)
        return longest if own.random() < share else own.randint(shortest, longest)

    return length


class Played:
    """A run under a virtual clock.

    Args:
        seed: Seed of the schedule, the lengths and the grades.
        other: Another draw of engines and of the order of grades, which must not matter.
    """

    def __init__(self, seed, other):
        draw = random.Random(seed)
        self.config = config_of(draw)
        self.lengths = lengths_of(draw)
        self.spread = draw.choice([0.1, 0.5, 0.9])
        self.problems = draw.randint(1, 8)
        chance = random.Random(f"{seed} {other}")
        self.chance = chance
        engines = chance.randint(1, 4)
        self.pool = VirtualPool(
            engines, self.lengths, capacity=chance.choice([1, 3, 100]), token_s=1e-4
        )
        for engine in self.pool.engines_:
            engine.step_s = chance.choice([0.001, 0.01, 0.1])
        self.grades: Any = LateGrades(chance, self.spread)
        self.sampler = self.new_sampler()
        self.trained: list[tuple[tuple[int, ...], ...]] = []

    def new_sampler(self):
        problems = [Problem(f"d:{i}", "", (1, i), ()) for i in range(self.problems)]
        return Sampler(self.config, ProblemStream(problems))

    def run(self, restarts):
        overlap = overlap_of(self.config.rollout)
        ahead = overlap.is_beside and not overlap.cuts_at_sync
        for step in range(1, STEPS + 1):
            if overlap.cuts_at_sync:
                sampled = self.sample_openly(self.sampler, step)
            else:
                if self.sampler.round is None:
                    self.generate(step)
                sampled = self.sampler.take(step)
            self.look(sampled, step)
            if ahead and step < STEPS:
                self.generate(step + 1, ahead=True)
            self.pool.take_weights(step, self.chance.random())
            if restarts and self.chance.random() < 0.5:
                state, ledger = self.sampler.state_dict(), self.sampler.ledger
                self.sampler = self.new_sampler()
                self.sampler.ledger = ledger
                self.sampler.load_state_dict(state)

    def generate(self, step, ahead=False):
        pool = self.pool
        self.sampler.generate(step, pool, self.grades, contextlib.nullcontext, ahead=ahead)

    def sample_openly(self, sampler, step):
        def train_s(_):
            return self.chance.choice([0.0, 0.01, 0.3, 10.0]) if step < STEPS else 0.0

        return sample_openly(sampler, step, self.pool, self.grades, train_s)

    def look(self, sampled, step):
        """Each sample is whole, and says which weights sampled it."""
        lag = overlap_of(self.config.rollout).max_lag
        assert len({group.problem.id for group in sampled.finished}) == len(sampled.finished)
        for group in sampled.groups:
            assert len(group.samples) == self.config.algorithm.group_size
            for graded in group.samples:
                one = graded.sample
                request = dataclasses.replace(WHOLE, seed=one.seed)
                assert len(one.token_ids) == self.lengths(request)
                versions = [version for version, _ in one.spans]
                assert versions == sorted(set(versions)) and one.spans[0][1] == 0
                if self.config.algorithm.filter.keep == BASE.algorithm.filter.keep:
                    fresh = self.config.rollout.schedule is RolloutSchedule.synchronous
                    assert fresh or step - 1 - versions[0] <= lag + len(self.sampler._short_steps)
        self.trained.append(
            tuple(tuple(s.sample.seed for s in group.samples) for group in sampled.groups)
        )
        balance = self.sampler.ledger.balance
        assert balance.admitted == sum(balance.ended.values()) + len(balance.live)
        assert balance.ended[Event.trained] == sum(len(groups) for groups in self.trained)
        # Nothing starves: what is live may still be trained in time.
        live = [*self.sampler._kept_since.values(), *(g.step for g in self.sampler._live.values())]
        for admitted in live if lag else []:
            short = sum(1 for one in self.sampler._short_steps if one >= admitted)
            assert step - admitted < lag + short + 1


WHOLE = Request("d:0", 0, (1, 0), 100, 1.0, 1.0, 0)


def play(seed):
    """A run, and one with other engines, other times and restarts: both train on the same.

    But with the continuous schedule, where times decide.
    """
    one, two = Played(seed, 1), Played(seed, 2)
    try:
        one.run(restarts=False)
        two.run(restarts=True)
        if not overlap_of(one.config.rollout).cuts_at_sync:
            assert one.trained == two.trained
    except BaseException as error:
        error.add_note(f"seed {seed}: {one.config.rollout.schedule}, {one.config.algorithm}")
        raise


def test_no_random_schedule_loses_delays_or_reorders_a_group():
    for seed in range(FAST_SCHEDULES):
        play(seed)


@pytest.mark.process  # Not on each save: it takes as long as hundreds of other tests.
def test_nor_does_any_of_hundreds():
    for seed in range(FAST_SCHEDULES, SCHEDULES):
        play(seed)


@pytest.mark.long
def test_nor_does_any_of_a_hundred_thousand():
    for seed in range(SCHEDULES, LONG_SCHEDULES):
        play(seed)
