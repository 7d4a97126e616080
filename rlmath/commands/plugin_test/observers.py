from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlmath.actor.plan import PLAIN
from rlmath.commands.plugin_test.finding import Finding, findings, repeats
from rlmath.monitor.phase_observers import PHASE_OBSERVERS, PhaseObserver
from rlmath.rewards.made_sample import made_sample
from rlmath.training.checks.base import STEP_CHECKS, BeforeUpdate, InvariantError
from rlmath.types import GradedSample, Group, Problem


def check_phase_observer(name: str) -> Iterator[Finding]:
    def in_folder(
        watch: Callable[[PhaseObserver], None], starts: int = 1
    ) -> Callable[[], Iterator[str]]:
        def test() -> Iterator[str]:
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(starts):
                    observer = PHASE_OBSERVERS.get(name)(Path(folder))
                    watch(observer)
                    observer.close()
            yield from ()

        return test

    def nest(observer: PhaseObserver) -> None:
        for step in (1, 2):
            observer.begin("generate", step)
            observer.begin("grade", step)
            observer.end("grade", step, 0.25)
            observer.end("generate", step, 0.5)

    def break_off(observer: PhaseObserver) -> None:
        observer.begin("update", 1)

    return findings(
        {
            "takes phases within phases": in_folder(nest),
            "a run without phases is no error": in_folder(lambda _: None),
            "a run that fails within a phase is no error": in_folder(break_off),
            "a run may begin again in its folder": in_folder(nest, starts=2),
        }
    )


class _NotHereError(Exception):
    """A check asks for ranks or engines, which only a run has."""


class _NotHere:
    def __getattr__(self, name: str) -> Any:
        raise _NotHereError(name)


def check_step_check(name: str) -> Iterator[Finding]:
    """Test the invariants of the step check called ``name`` on a step of eight made-up samples.

    Its calls of ranks and engines are tested in a run (:mod:`.in_run`).
    """
    part = _StepCheck(name)
    return findings(
        {
            "metrics are finite numbers by name": part.metrics,
            "a step without groups is no error": part.without_groups,
            "samples are left alone": part.samples_unchanged,
            "deterministic": repeats(lambda: part.run(made_groups())),
        }
    )


@dataclass(frozen=True)
class _StepCheck:
    name: str

    def run(self, groups: list[Group]) -> Any:
        """Result of a healthy step, which it may not refuse."""
        check = STEP_CHECKS.get(self.name)()
        not_here: Any = _NotHere()
        monitor: Any = SimpleNamespace(warn=lambda *_, **__: None)
        now = BeforeUpdate(not_here, monitor, 1, PLAIN, groups, groups, None)
        with contextlib.closing(check), contextlib.suppress(_NotHereError):
            return check.before_update(now)
        return {}

    def metrics(self) -> Iterator[str]:
        try:
            found = self.run(made_groups())
        except InvariantError as error:
            yield f"a healthy step is refused: {error}"
            return
        if not isinstance(found, dict):
            yield f"before_update returned {found!r}, not a dict"
            return
        for key, value in found.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not isinstance(key, str) or not is_number or not math.isfinite(value):
                yield f"metric {key!r} is {value!r}"

    def without_groups(self) -> Iterator[str]:
        self.run([])
        yield from ()

    def samples_unchanged(self) -> Iterator[str]:
        groups = made_groups()
        before = copy.deepcopy(groups)
        self.run(groups)
        for group, other in zip(groups, before, strict=True):
            if _content(group) != _content(other):
                yield f"group {group.problem.id} is {_content(group)}, not {_content(other)}"


def _content(group: Group) -> list[Any]:
    found = []
    for one in group.samples:
        tokens, log_probs = one.sample.token_ids.tolist(), one.sample.log_probs.tolist()
        found.append((one.reward, one.sample.text, tokens, log_probs))
    return [dict(group.problem.columns), *found]


def made_groups() -> list[Group]:
    groups = []
    for number in range(2):
        name, answer = f"p{number}", str(number + 1)
        problem = Problem(name, f"{number}+1=", (5, 6, 7), (answer,), {"prompt": f"{number}+1="})
        samples = []
        for index in range(4):
            tokens, text = range(3 + index), f"\\boxed{{{index}}}"
            sample = made_sample(name, index, tokens, text, seed=8 * number + index)
            is_right = index == number + 1
            status = "correct" if is_right else "wrong"
            samples.append(GradedSample(sample, float(is_right), is_right, status))
        groups.append(Group(problem, tuple(samples)))
    return groups
