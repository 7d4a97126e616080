"""A curriculum: a problem that all samples solve is skipped for some steps.

rlmath train experiment=quickstart algorithm.curriculum.cooldown=true \\
    algorithm.curriculum.kind=examples/plugins/curriculum.py:Once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.algorithms.curriculum import CURRICULA, CooldownSettings
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class OnceOptions(Options):
    steps: int = setting(20, "Steps for which a solved problem is skipped.", least=1)


@CURRICULA.register("once", OnceOptions)
class Once:
    def __init__(self, settings: CooldownSettings, options: OnceOptions) -> None:
        self._steps, self._until = options.steps, dict[str, int]()

    def update(self, problem_id: str, passed: int, graded: int, step: int) -> None:
        self._until[problem_id] = step + 1 + self._steps if passed == graded > 0 else 0

    def is_on_cooldown(self, problem_id: str, step: int) -> bool:
        return step < self._until.get(problem_id, 0)

    def on_cooldown(self, step: int) -> int:
        return sum(step < until for until in self._until.values())

    def state(self) -> dict[str, Any]:
        return dict(self._until)

    def load_state(self, state: dict[str, Any]) -> None:
        self._until = dict(state)
