"""Grades samples while others are still generated, and puts them together in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlmath.rewards.mix import RewardMix
from rlmath.types import Group, Problem, Sample


class Grading:
    """Groups whose samples are all there and whose grading may still be under way."""

    def __init__(self, groups: Sequence[Future[Group]]) -> None:
        self._groups = groups

    def wait(self) -> tuple[Group, ...]:
        """The groups, in the order of the problems, each with its samples by index.

        Raises:
            RewardError: A reward failed.
        """
        return tuple(group.result() for group in self._groups)


class Collector:
    """Threads that grade. They wait for the grader's processes, so they cost no core.

    Args:
        rewards: What to grade with.
        num_threads: Samples graded at once.
    """

    def __init__(self, rewards: RewardMix, num_threads: int = 4) -> None:
        self._rewards = rewards
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grade")

    def collect(
        self, problems: Sequence[Problem], samples: Iterable[Sample], group_size: int
    ) -> Grading:
        """Take samples as they come and grade each at once; returns when the last is there.

        What compares the samples of a problem is graded when its last sample is there.

        Args:
            problems: With ids of their own; every sample answers one of them.
            samples: In any order.
            group_size: Samples of each problem.
        """
        by_id = {problem.id: problem for problem in problems}
        arrived: dict[str, list[tuple[Sample, Future[Any]]]] = {id_: [] for id_ in by_id}
        graded: dict[str, Future[Group]] = {}
        for sample in samples:
            problem = by_id[sample.problem_id]
            piece = self._threads.submit(self._rewards.prescore_group, problem, [sample])
            own = arrived[problem.id]
            own.append((sample, piece))
            if len(own) == group_size:
                graded[problem.id] = self._threads.submit(self._finish, problem, own)
        return Grading([graded[problem.id] for problem in problems])

    def close(self) -> None:
        """End the threads once what they do now is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _finish(self, problem: Problem, arrived: list[tuple[Sample, Future[Any]]]) -> Group:
        """The group of a problem. Its samples were handed to the threads earlier, so none of the
        pieces waits for a thread that this call holds."""
        arrived = sorted(arrived, key=lambda item: item[0].index)
        samples = [sample for sample, _ in arrived]
        pieces = [piece for _, future in arrived for piece in future.result()]
        graded = self._rewards.score_group(problem, samples, prescored=pieces)
        return Group(problem, tuple(graded))
