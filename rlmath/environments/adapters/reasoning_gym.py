"""Procedural problems of reasoning-gym (``pip install reasoning-gym``).

A data source, and a reward that asks the task how right an answer is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.data import DATA_SOURCES
from rlmath.errors import UserError
from rlmath.grading.box import last_box
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class ReasoningGymOptions(Options):
    tasks: str = setting("chain_sum", "Names of the tasks, separated by commas; they take turns.")
    size: int = setting(10_000, "Problems of each task; then they begin again.", least=1)
    seed: int = setting(0, "Seed of the problems.", least=0)


@DATA_SOURCES.register("reasoning_gym", ReasoningGymOptions)
class ReasoningGym:
    """Rows with ``question``, ``answer``, and what :func:`score` needs."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options, self._given = options, 0
        self._tasks = [name.strip() for name in options.tasks.split(",")]
        for task in self._tasks:
            _problems(task, options.size, options.seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size, seed = self._options.size, self._options.seed
        while self._given < size * len(self._tasks):
            index, at = divmod(self._given, len(self._tasks))
            task = self._tasks[at]
            found = _problems(task, size, seed)[index]
            self._given += 1  # Before the row is given: the state is that behind it.
            yield {
                "id": f"{task}/{index}",
                "question": found["question"],
                "answer": str(found["answer"]),
                "reasoning_gym": [task, size, seed, index],
            }
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given = int(state["given"])


def score(
    completions: Sequence[str], reasoning_gym: Sequence[Sequence[Any]], **_: Any
) -> list[float]:
    """A reward from 0 to 1: the task's score of the answer, in ``<answer>`` or in a box."""
    from reasoning_gym.utils import extract_answer

    found = []
    for text, (task, size, seed, index) in zip(completions, reasoning_gym, strict=True):
        answer = extract_answer(text)
        answer = last_box(text) if answer is None else answer
        problems = _problems(task, size, seed)
        found.append(float(problems.score_answer(answer, problems[index])))
    return found


@functools.lru_cache(maxsize=256)
def _problems(task: str, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"data.source: install the package reasoning-gym ({error})") from error
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed)
    except ValueError as error:
        raise UserError(f"data.source_options.tasks={task}: {error}") from error
