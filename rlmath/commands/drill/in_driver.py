from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from rlmath.commands.drill.fault import Fault, Scene, patch, scene_fault
from rlmath.config.schema import Config
from rlmath.rewards.answers import AnswerGrader
from rlmath.rewards.base import Values
from rlmath.rewards.program_tests import CodeReward
from rlmath.rewards.registry import any_graded
from rlmath.rewards.sandbox import CodeProvider, Execution, Limits, PreparedProgram, Program

FAULTS: list[Fault] = []


def _no_grader(config: Config) -> str | None:
    if any_graded(item.name for item in config.reward.items):
        return None
    return "reward.items: none of them grades answers"


def _many_answers(config: Config) -> str | None:
    if config.data.max_leaked_answers >= 1:
        return "data.max_leaked_answers=1: leaks are accepted"
    return None


@scene_fault(FAULTS, "one_seed", "invariant: independent samples", "have the same seed")
def one_seed(scene: Scene) -> Any:
    """All samples of a problem get the same seed."""
    from rlmath.rollout import seeds

    return patch(seeds, "request_seed", lambda seed, *given: seed(*given[:-1], 0))


@scene_fault(
    FAULTS,
    "copied_samples",
    "invariant: independent samples",
    "pairs of samples of one problem are identical",
)
def copied_samples(scene: Scene) -> Any:
    """Every second sample of a problem is a copy with a different seed."""
    from rlmath.rollout.pool import RolloutPool

    def generate(original: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        first: dict[tuple[str, int], Any] = {}
        waiting: dict[tuple[str, int], Any] = {}
        for sample in original(*arguments, **options):
            pair = (sample.problem_id, sample.index // 2)
            second: Any = sample
            if sample.index % 2 == 0:
                first[pair] = sample
                yield sample
                second = waiting.pop(pair, None)
            elif pair not in first:
                second, waiting[pair] = None, sample
            if second is not None:
                yield dataclasses.replace(first[pair], index=second.index, seed=second.seed)
        yield from waiting.values()

    return patch(RolloutPool, "generate", generate)


@scene_fault(
    FAULTS,
    "reward_errors",
    "reward error, or the detector unscored",
    r"planted by rlmath drill|unscored: since step",
    latest=3,
)
def rewards_that_raise(scene: Scene) -> Iterator[None]:
    """Every reward raises."""

    def raising(*arguments: Any, **columns: Any) -> Any:
        raise RuntimeError("planted by rlmath drill")

    with contextlib.ExitStack() as stack:
        for kind in {type(item.reward) for item in scene.run.sampling.rewards.items}:
            stack.enter_context(mock.patch.object(kind, "__call__", raising))
        yield


@scene_fault(
    FAULTS,
    "grading_timeouts",
    "detector grading_failed",
    "grading_failed: since step",
    latest=3,
    missing=_no_grader,
)
def grades_that_time_out(scene: Scene) -> Any:
    """Every grade is a timeout."""
    from rlmath.grading import Grade

    late = Grade(False, "timeout", None, None, "sympy", 5.0)
    return patch(AnswerGrader, "grade", lambda original, grader, texts, golds: [late] * len(texts))


@scene_fault(
    FAULTS,
    "program_timeouts",
    "detector sandbox_timeouts",
    "sandbox_timeouts: since step",
    latest=3,
)
def programs_that_time_out(scene: Scene) -> Iterator[None]:
    """A reward's programs all time out in the sandbox."""
    from rlmath.rewards.mix_items import MixItem

    rewards = scene.run.sampling.rewards
    with contextlib.closing(_OneProgram(provider=_TimingOut())) as reward:
        item = MixItem(reward, "planted_program", weight=0.0)
        rewards._locks[item.label] = contextlib.nullcontext()
        with mock.patch.object(rewards, "items", (*rewards.items, item)):
            yield


class _OneProgram(CodeReward):
    """Runs one program for each response, whatever is in it."""

    __name__ = "planted_program"
    value_range = (0.0, 1.0)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        def judge(index: int, text: str) -> float:
            with self.prepare(Program("python", "print(1)"), self.limits) as program:
                return float(program.run().status == "ok")

        return self.judge_all(completions, judge)


class _TimingOut(CodeProvider):
    """A sandbox that has lost its machine: each run ends at its limit."""

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        return _NeverEnding()


class _NeverEnding(PreparedProgram):
    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        return Execution("timeout")


@scene_fault(
    FAULTS,
    "leaked_answers",
    "error before anything starts",
    "prompts contain their own answer",
    where="data",
    from_step=1,
    latest=0,
    missing=_many_answers,
)
def leaked_answers(scene: Scene) -> Any:
    """The prompts contain their answers."""
    from rlmath.data import load

    def with_answers(usable: Any, *arguments: Any) -> Any:
        drafts, skipped = usable(*arguments)
        told = [dataclasses.replace(one, prompt=f"{one.prompt} {one.target[0]}") for one in drafts]
        return told, skipped

    return patch(load, "usable_rows", with_answers)
