from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.algorithms.curriculum import CURRICULA, CooldownSettings, Curriculum
from rlmath.commands.plugin_test.finding import Finding, findings, repeats
from rlmath.utils.setting import Options

PROBLEMS, STEPS, MOST_STEPS = 12, 30, 10_000


def check_curriculum(name: str) -> Iterator[Finding]:
    part = _Part(name, CURRICULA.options(name)())
    return findings(
        {
            "a problem that was never tried is not skipped": part.new_problem,
            "a skipped problem comes again": part.comes_again,
            "its state continues as it would have": part.resumes,
            "deterministic": repeats(lambda: part.visits(part.make(), 1, STEPS)),
        }
    )


@dataclass(frozen=True)
class _Part:
    name: str
    options: Options

    def make(self) -> Curriculum:
        return CURRICULA.get(self.name)(CooldownSettings(cooldown=True), self.options)

    def visits(self, one: Curriculum, first: int, last: int) -> list[tuple[int, str, bool]]:
        """Visit all problems, try those that are not skipped, and record each visit."""
        seen = []
        for step in range(first, last):
            draw = random.Random(step)
            for number in range(PROBLEMS):
                problem = f"p{number}"
                skips = bool(one.is_on_cooldown(problem, step))
                seen.append((step, problem, skips))
                passed = round(4 * number / (PROBLEMS - 1)) if draw.random() < 0.9 else 2
                if not skips:
                    one.update(problem, passed, 4, step)
        return seen

    def new_problem(self) -> Iterator[str]:
        one = self.make()
        for step in (1, 50):
            if one.is_on_cooldown("p0", step):
                yield f"at step {step} a problem that was never tried is skipped"

    def comes_again(self) -> Iterator[str]:
        one = self.make()
        self.visits(one, 1, STEPS)
        for number in range(PROBLEMS):
            later = range(STEPS, STEPS + MOST_STEPS)
            if all(one.is_on_cooldown(f"p{number}", step) for step in later):
                yield f"p{number} is skipped from step {STEPS} to {later[-1]}"

    def resumes(self) -> Iterator[str]:
        straight, first, second = self.make(), self.make(), self.make()
        half = STEPS // 2
        wanted = self.visits(straight, 1, STEPS)[(half - 1) * PROBLEMS :]
        self.visits(first, 1, half)
        second.load_state(json.loads(json.dumps(first.state())))
        for (step, problem, skips), (_, _, other) in zip(
            self.visits(second, half, STEPS), wanted, strict=True
        ):
            if skips != other:
                case = f"resumed after step {half - 1}, at step {step} {problem} is skipped"
                yield f"{case}: {skips}, not {other}"
