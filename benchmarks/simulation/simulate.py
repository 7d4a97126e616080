"""A run under a virtual clock: the real sampler, assignment, schedule and ledger; fake engines.

What is real decides which samples are asked for, cut, continued and trained, and which engine gets
which. What is simulated is time: decode steps, prefill, and the actor's work on a step's tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.virtual_engines import VirtualPool
from rlmath.config.rollout import Overlap
from rlmath.config.schema import Config
from rlmath.data import ProblemStream
from rlmath.engines.requests import Request
from rlmath.rollout.round import Sampled
from rlmath.rollout.sampler import Sampler
from rlmath.types import GradedSample, Group, Problem, Sample


@dataclass(frozen=True)
class Times:
    """How long things take.

    Attributes:
        step_s: Seconds of a decode step, without the part that grows with the tokens held.
        token_s: Seconds of a decode step for each token held.
        prefill_token_s: Seconds of reading a token of a prompt, or of a begun response.
        train_token_s: Seconds of the actor for each prompt and response token of a step.
        fixed_s: Further seconds of a step, while engines are idle: weight sync, moving state.
        sequence_s: Seconds of a decode step for each running sequence, where its arithmetic is not
            hidden behind reading the weights.
        contended_share: Share of their time that engines and actor each lose while both work,
            to processes that would otherwise run on what the idle one has left; 0 on GPUs.
        prepare_s: Seconds of a step's training, whatever its tokens: batches, advantages, checks.
            Engines that sample ahead do so meanwhile too.
    """

    step_s: float
    token_s: float
    prefill_token_s: float
    train_token_s: float
    fixed_s: float
    sequence_s: float = 0.0
    contended_share: float = 0.0
    prepare_s: float = 0.0


@dataclass(frozen=True)
class Setup:
    """Setup of a run, whatever the schedule.

    Attributes:
        engines: Engines.
        capacity: Sequences that an engine runs at once.
        prompt_tokens: Tokens of each prompt.
        lengths: Lengths of the responses.
        times: Durations.
    """

    engines: int
    capacity: int
    prompt_tokens: int
    lengths: Lengths
    times: Times


@dataclass(frozen=True)
class Choice:
    """A schedule.

    Attributes:
        overlap: ``rollout.max_lag`` and ``rollout.cut_after_tokens``.
        engines: Number of engines beside the actor, which has the other GPUs; ``None``: they share
            the GPUs and take turns.
    """

    overlap: Overlap = dataclasses.field(default_factory=Overlap)
    engines: int | None = None

    @property
    def settings(self) -> list[str]:
        found = [f"rollout.max_lag={self.overlap.max_lag}"]
        if self.overlap.cut_after_tokens is not None:
            found.append(f"rollout.cut_after_tokens={self.overlap.cut_after_tokens}")
        if self.engines is not None:
            found += ["cluster.placement=separate", f"rollout.engines={self.engines}"]
        return found


@dataclass(frozen=True)
class Outcome:
    """Results of a schedule, as the mean over the steps after the first ``max_lag + 1``.

    Attributes:
        choice: The schedule.
        step_s: Seconds of a step.
        generate_s: From the first request to the last sample of a step.
        idle_share: Idle share of the engines' time during generation.
        actor_idle_share: Idle share of the actor's time in the whole step.
        tokens_per_s: Response tokens that are trained on, per second.
        lag_mean: Lag of the tokens that are trained on, in steps.
        lag_p99: The same.
        mixed_share: Samples of more than one weights version.
        recomputed_share: Tokens that engines read again / response tokens that are trained on.
    """

    choice: Choice
    step_s: float
    generate_s: float
    idle_share: float
    actor_idle_share: float
    tokens_per_s: float
    lag_mean: float
    lag_p99: float
    mixed_share: float
    recomputed_share: float


def simulate(config: Config, setup: Setup, choice: Choice, steps: int) -> Outcome:
    """Play a run.

    Args:
        config: Settings, whose sizes of the algorithm and longest response count.
        setup: Engines, lengths and times.
        choice: The schedule.
        steps: To play, after the first ``max_lag + 1``, which fill the schedule.
    """
    config = _with(config, choice)
    prompt = (0,) * setup.prompt_tokens
    problems = len(setup.lengths.tokens)
    stream = ProblemStream(
        [Problem(str(i), "", prompt, ()) for i in range(problems)], shuffle=False
    )
    overlap = choice.overlap
    steps_in_all = overlap.max_lag + 1 + steps
    # The continuous schedule begins nothing that the run does not train: this one is longer.
    runner = dataclasses.replace(config.runner, steps=steps_in_all + overlap.max_lag + 1)
    sampler = Sampler(dataclasses.replace(config, runner=runner), stream)
    times = setup.times
    engines = choice.engines or setup.engines
    pool = VirtualPool(
        engines,
        setup.lengths,
        capacity=setup.capacity,
        step_s=times.step_s,
        token_s=times.token_s,
        prefill_token_s=times.prefill_token_s,
        sequence_s=times.sequence_s,
    )
    # The actor's share of the GPUs, on which the same work takes longer.
    actor_share = 1.0 if choice.engines is None else 1 - choice.engines / setup.engines
    collector: Any = InstantGrades()
    found: list[dict[str, float]] = []

    def groups_s(groups: Sequence[Group]) -> float:
        samples = [s.sample for group in groups for s in group.samples]
        tokens = sum(len(one.token_ids) + setup.prompt_tokens for one in samples)
        return tokens * times.train_token_s / actor_share

    def train_s(sampled: Sampled) -> float:
        return groups_s(sampled.groups) + times.prepare_s

    lost = times.contended_share
    for step in range(1, steps_in_all + 1):
        began_s, generate_s, idle_share = pool.now_s, 0.0, 0.0
        if overlap.cuts_at_sync:
            sampled = sample_openly(sampler, step, pool, collector, train_s, lost)
            trained_at_s = pool.now_s
            # Engines have work for nearly as long as the actor.
            worked_s = train_s(sampled) / (1 - lost)
            generate_s = trained_at_s - began_s
            assert pool.generation is not None
            idle_share = pool.generation.idle_share()
        else:
            if not sampler.is_sampled:
                generate_s, idle_share = _generate(sampler, step, pool, collector)
            sampled = sampler.take(step)
            worked_s = train_s(sampled)
            trained_at_s = pool.now_s + worked_s
        if overlap.is_beside and not overlap.cuts_at_sync:
            taken_at_s = pool.now_s
            trained_at_s = taken_at_s + worked_s / (1 - lost)
            pool.work_beside(lost, until_s=trained_at_s)
            generate_s, idle_share = _generate(sampler, step + 1, pool, collector, ahead=True)
            # The actor has the remaining time for itself.
            if trained_at_s > pool.now_s:
                trained_at_s = pool.now_s + (trained_at_s - pool.now_s) * (1 - lost)
            worked_s = trained_at_s - taken_at_s
            pool.work_beside(0.0)
        pool.take_weights(step, max(0.0, trained_at_s - pool.now_s) + times.fixed_s)
        step_s = pool.now_s - began_s
        found.append(
            {
                "step_s": step_s,
                "generate_s": generate_s,
                "idle_share": idle_share,
                "actor_idle_share": max(0.0, 1 - (worked_s + times.fixed_s) / step_s),
                "responses": _response_tokens(sampled),
                "lag_mean": sampled.metrics.get("rollout/lag_mean", 0.0),
                "lag_p99": sampled.metrics.get("rollout/lag_p99", 0.0),
                "mixed_share": sampled.metrics.get("rollout/mixed_sample_share", 0.0),
                "recomputed": sampled.metrics.get("sampling/recomputed_tokens", 0.0),
            }
        )
    measured = found[overlap.max_lag + 1 :]

    def mean(name: str) -> float:
        return statistics.fmean(one[name] for one in measured)

    return Outcome(
        choice=choice,
        step_s=mean("step_s"),
        generate_s=mean("generate_s"),
        idle_share=mean("idle_share"),
        actor_idle_share=mean("actor_idle_share"),
        tokens_per_s=mean("responses") / mean("step_s"),
        lag_mean=mean("lag_mean"),
        lag_p99=mean("lag_p99"),
        mixed_share=mean("mixed_share"),
        recomputed_share=mean("recomputed") / mean("responses"),
    )


def _response_tokens(sampled: Sampled) -> int:
    return sum(len(s.sample.token_ids) for group in sampled.groups for s in group.samples)


def _generate(
    sampler: Sampler, step: int, pool: VirtualPool, collector: Any, ahead: bool = False
) -> tuple[float, float]:
    """Sample for a step. Returns the seconds that it took, and the engines' idle share of them."""
    began_s = pool.now_s
    sampler.generate(step, pool, collector, contextlib.nullcontext, ahead=ahead)  # type: ignore[arg-type]
    assert pool.generation is not None
    return pool.now_s - began_s, pool.generation.idle_share()


def sample_openly(
    sampler: Sampler,
    step: int,
    pool: VirtualPool,
    collector: Any,
    train_s: Callable[[Sampled], float],
    lost: float = 0.0,
) -> Sampled:
    """A step of the continuous schedule, from its first request to the cut at its end.

    Args:
        train_s: The actor's seconds for a step's groups.
        lost: See ``Times.contended_share``.

    Returns:
        The step's groups.
    """
    work = sampler.open(step, collector)
    taken: Sampled | None = None
    is_cut = False

    def look() -> None:
        nonlocal taken
        if taken is None and work.is_ready:
            taken = sampler.take(step)
            pool.alarm_s = pool.now_s + train_s(taken) / (1 - lost)
            pool.work_beside(lost)

    def more(engines_idle: bool) -> list[Request]:
        nonlocal is_cut
        while not is_cut:
            look()
            if pool.now_s >= pool.alarm_s:
                break
            requests = work.more(engines_idle)
            look()
            if requests or not engines_idle:
                return requests
            if taken is not None:  # Nothing may run before the next weights.
                pool.now_s += (pool.alarm_s - pool.now_s) * (1 - lost)
                pool.alarm_s = pool.now_s
        is_cut = True
        if pool.generation is not None:
            pool.generation.cut()
        return []

    for sample in pool.generate(work.begin(), more):
        work.take(sample)
    pool.alarm_s = math.inf
    pool.work_beside(0.0)
    assert taken is not None
    sampler.close(step)
    return taken


class InstantGrades:
    """In place of the collector and its grading: every sample is right at once."""

    _group_size: int
    _problems: dict[str, Problem]
    _samples: dict[str, list[Sample]]
    _done: list[Group]

    def begin(self, group_size: int) -> InstantGrades:
        begun = copy.copy(self)
        begun._group_size = group_size
        begun._problems, begun._samples = {}, {}
        begun._done = []
        return begun

    def adopt(self, other: InstantGrades) -> set[str]:
        self._done += other._done
        return {group.problem.id for group in other._done}

    def expect(self, problems: Sequence[Problem], group_size: int | None = None) -> None:
        for problem in problems:
            self._problems[problem.id], self._samples[problem.id] = problem, []

    def add(self, sample: Sample) -> None:
        samples = self._samples[sample.problem_id]
        samples.append(sample)
        if len(samples) == self._group_size:
            in_order = sorted(samples, key=lambda one: one.index)
            graded = tuple(self.grade(one) for one in in_order)
            self._done.append(Group(self._problems[sample.problem_id], graded))

    def grade(self, sample: Sample) -> GradedSample:
        """Its grade."""
        return GradedSample(sample, 1.0, None, "ungraded")

    def take_finished(self, block: bool = False, meanwhile: Any = None) -> list[Group]:
        done, self._done = self._done, []
        return done


def _with(config: Config, choice: Choice) -> Config:
    """The settings with a schedule, and without what depends on rewards; virtual engines have no
    arrays to keep."""
    rollout = dataclasses.replace(
        config.rollout,
        schedule=None,
        cut_after_tokens=choice.overlap.cut_after_tokens,
        max_lag=choice.overlap.max_lag,
    )
    algorithm = dataclasses.replace(
        config.algorithm, filter=type(config.algorithm.filter)(), curriculum=_no_curriculum(config)
    )
    return dataclasses.replace(config, rollout=rollout, algorithm=algorithm)


def _no_curriculum(config: Config) -> Any:
    return type(config.algorithm.curriculum)()
