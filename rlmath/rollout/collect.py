"""Grade samples while others are still generated, and collect them into groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from rlmath.monitor.repetition import repetition
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.scored import Partial
from rlmath.types import GradedSample, Group, Problem, Repetition, Sample
from rlmath.utils.daemon_threads import DaemonThreads
from rlmath.utils.futures import gather, resolve, when_all

# Seconds between two checks for a request to end, while waiting for grades.
LOOK_EVERY_S = 0.1


class SamplingCancelled(Exception):
    """The step or the run that was sampled for ends."""


class Grading:
    """Groups that become complete and graded while others are still sampled.

    Rewards that compare a problem's samples run when its last sample arrives. No thread is blocked
    by asynchronous rewards: their pending results are collected when they arrive. ``group_size``:
    default number of samples per problem.
    """

    def __init__(self, rewards: RewardMix, threads: DaemonThreads, group_size: int) -> None:
        self._rewards, self._threads, self._group_size = rewards, threads, group_size
        self._cancelled = threading.Event()
        self._sizes: dict[str, int] = {}
        self._problems: dict[str, Problem] = {}
        self._arrived: dict[str, list[tuple[Sample, Future[list[Partial]]]]] = {}
        self._graded: dict[str, Future[Group]] = {}
        self._given: set[str] = set()
        self._pieces: dict[tuple[str, int], Future[Any]] = {}
        self._repetition: dict[tuple[str, int], Repetition] = {}

    def expect(self, problems: Sequence[Problem], group_size: int | None = None) -> None:
        """Announce problems whose samples will arrive, with their own ids. ``group_size``: samples
        of each; ``None``: the default. A group continued by a resumed run may have a different size
        than the current settings."""
        for problem in problems:
            self._sizes[problem.id] = self._group_size if group_size is None else group_size
            self._problems[problem.id] = problem
            self._arrived[problem.id] = []

    def adopt(self, other: Grading) -> set[str]:
        """Take over the complete groups that another grading has not returned. Returns their
        problem ids."""
        left = other._graded.keys() - other._given
        for id_ in left:
            self._problems[id_] = other._problems[id_]
            self._arrived[id_] = other._arrived[id_]
            self._graded[id_] = other._graded[id_]
        self._pieces |= {key: one for key, one in other._pieces.items() if key[0] in left}
        return set(left)

    def add(self, sample: Sample) -> None:
        problem = self._problems[sample.problem_id]
        own = self._arrived[problem.id]

        def score() -> list[Partial]:
            written = sample.model_part()
            found = repetition(written.text, written.token_ids)
            self._repetition[problem.id, sample.index] = found
            if sample.failure is not None:
                return [Partial()]
            return self._rewards.prescore_group(problem, [written])

        piece = self._run(score)
        self._pieces[problem.id, sample.index] = piece
        own.append((sample, piece))
        if len(own) == self._sizes[problem.id]:
            self._graded[problem.id] = self._finish(problem, own)

    def take_finished(self, block: bool = False) -> list[Group]:
        """Groups graded since the last call. ``block``: wait until there is one, if any is
        complete. Raises RewardError: a reward failed; SamplingCancelled: cancelled while blocked.
        """
        left = {id_: group for id_, group in self._graded.items() if id_ not in self._given}
        while block and left:
            if wait(left.values(), LOOK_EVERY_S, return_when=FIRST_COMPLETED).done:
                break
            if self._cancelled.is_set():
                raise SamplingCancelled
        new = [id_ for id_, group in left.items() if group.done()]
        self._given.update(new)
        return [left[id_].result() for id_ in new]

    def cancel(self) -> None:
        """Let the thread that waits in :meth:`take_finished` give up, within a second."""
        self._cancelled.set()

    def wait(self) -> tuple[Group, ...]:
        """All groups, in the order of the problems, each with its samples by index. Raises
        RewardError: a reward failed."""
        return tuple(self._graded[id_].result() for id_ in self._problems)

    def ungraded_samples(self) -> list[tuple[str, int]]:
        """Problem and index of the samples that are being graded or wait for it.

        All samples of a group while rewards that compare them run.
        """
        found = [key for key, piece in list(self._pieces.items()) if not piece.done()]
        for id_, group in list(self._graded.items()):
            if not group.done():
                found += [(id_, sample.index) for sample, _ in self._arrived[id_]]
        return list(dict.fromkeys(found))

    def _finish(
        self, problem: Problem, arrived: list[tuple[Sample, Future[list[Partial]]]]
    ) -> Future[Group]:
        """The group of a problem, once all its rewards have finished."""
        arrived = sorted(arrived, key=lambda item: item[0].index)
        samples = [sample for sample, _ in arrived]
        # The others cannot be graded, not even relative to each other.
        sound = [one for one in samples if one.failure is None]
        pieces = gather([piece for one, piece in arrived if one.failure is None])
        group: Future[Group] = Future()

        # A callback that referenced its own future would be a cycle, and samples with the memory of
        # their arrays would stay until garbage collection.
        def compare(done: Future[list[list[Partial]]]) -> None:
            whole = self._run(
                lambda: self._rewards.begin_group(
                    problem,
                    [one.model_part() for one in sound],
                    [one for piece in done.result() for one in piece],
                )
            )
            whole.add_done_callback(add_up)

        def grade(whole: Future[list[Partial]]) -> Group:
            found = {s.sample.index: s for s in self._rewards.grade(sound, whole.result())}
            return Group(
                problem,
                tuple(
                    replace(
                        found.get(one.index, GradedSample(one, None, None, "ungraded")),
                        repetition=self._repetition.get((problem.id, one.index)),
                    )
                    for one in samples
                ),
            )

        def add_up(whole: Future[list[Partial]]) -> None:
            resolve(group, lambda: grade(whole))

        pieces.add_done_callback(compare)
        return group

    def _run(self, work: Callable[[], list[Partial]]) -> Future[list[Partial]]:
        """The result of ``work``, run in a thread, once nothing of it is pending."""
        result: Future[list[Partial]] = Future()

        def on_start(call: Future[list[Partial]]) -> None:
            failed = call.cancelled() or call.exception() is not None
            pending = [] if failed else [one for piece in call.result() for one in piece.pending]
            when_all(pending, lambda: resolve(result, call.result))

        try:
            self._threads.submit(work).add_done_callback(on_start)
        except RuntimeError as error:  # The threads have stopped.
            result.set_exception(error)
        return result


class Collector:
    """Grading threads. They mostly wait for the grader's processes, so they need no core.
    ``num_threads``: number of samples graded concurrently."""

    def __init__(self, rewards: RewardMix, num_threads: int = 4) -> None:
        self._rewards = rewards
        self._last: Grading | None = None
        self._threads = DaemonThreads(num_threads, "grade")

    def begin(self, group_size: int, rewards: RewardMix | None = None) -> Grading:
        """Start grading samples that arrive one by one, for problems announced later. ``rewards``:
        rewards for grading; ``None``: training's."""
        self._last = Grading(rewards or self._rewards, self._threads, group_size)
        return self._last

    def collect(
        self,
        problems: Sequence[Problem],
        samples: Iterable[Sample],
        group_size: int,
        rewards: RewardMix | None = None,
    ) -> Grading:
        """Grade samples as they arrive; returns after the last one arrived.

        Args:
            problems: Problems with their own ids; every sample answers one of them.
            samples: Samples in any order.
            rewards: As in :meth:`begin`.
        """
        grading = self.begin(group_size, rewards)
        grading.expect(problems)
        for sample in samples:
            grading.add(sample)
        return grading

    def ungraded_samples(self) -> list[tuple[str, int]]:
        """:meth:`Grading.ungraded_samples` of the last samples."""
        return [] if self._last is None else self._last.ungraded_samples()

    def cancel(self) -> None:
        """Let the thread that waits for the last samples' grades give up, within a second."""
        if self._last is not None:
            self._last.cancel()

    def close(self) -> None:
        """Start no more grading. Hanging calls are abandoned."""
        self.cancel()
        self._threads.close()
