"""Scoring by a teacher: its log-probs of the tokens that the policy sampled."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlmath.cluster.watchdog import WatchedComponent
from rlmath.engines.requests import Request
from rlmath.errors import ComponentError
from rlmath.rollout import watchdog_probes
from rlmath.types import Group, Sample

if TYPE_CHECKING:
    from rlmath.rollout.pool import RolloutPool

LogProbs: TypeAlias = NDArray[np.float32]

# Longest wait at a run's end for sequences that are being scored.
CLOSE_WAIT_S = 10.0


class TeacherError(ComponentError):
    """A sample that the teacher could not score. The message tells which and why."""


@dataclass(frozen=True)
class ToScore:
    name: str  # Name of problem and sample, for messages.
    prompt_token_ids: tuple[int, ...]  # Prompt of the problem.
    sample: Sample  # Sample with the tokens to score.


class Teacher(Protocol):
    """Interface of teachers."""

    def probe(self) -> None:
        """Check in seconds that it works, before anything is started. Raises UserError: it cannot
        be used with these settings."""

    def submit(self, sequence: ToScore) -> Future[LogProbs]:
        """Score a sequence in the background.

        Returns:
            Float32 ``[n]``: the teacher's log-prob of each of the sample's ``n`` tokens, at
            temperature 1, after the prompt and the tokens before it; or a ComponentError after more
            failures than the settings allow.
        """

    def close(self) -> None:
        """End requests in progress."""

    def watchdog_probe(self) -> WatchedComponent:
        """The calls that the run waits for."""


class EngineTeacher:
    """A teacher on vLLM engines of the run. An engine that fails is restarted, and its sequences
    are scored again. ``pool``: engines with the teacher's weights. ``vocabulary``: rows of the
    teacher's embedding."""

    def __init__(self, pool: RolloutPool, vocabulary: int) -> None:
        self.pool, self._vocabulary = pool, vocabulary
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked = 0
        self._futures: dict[int, Future[LogProbs]] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def probe(self) -> None:
        """Do nothing: the folder was checked with the settings."""

    def submit(self, sequence: ToScore) -> Future[LogProbs]:
        future: Future[LogProbs] = Future()
        largest = int(np.asarray(sequence.sample.token_ids).max(initial=0))
        with self._lock:
            if largest >= self._vocabulary:
                future.set_exception(self._unreadable(sequence, largest))
            elif self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._futures[self._asked] = future
                self._queue.put(_request(self._asked, sequence))
                self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="teacher", daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End requests in progress. The engines have none when this returns, unless one hangs."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)

    def watchdog_probe(self) -> WatchedComponent:
        return watchdog_probes.engines(self.pool)

    def _run(self) -> None:
        try:
            for sample in self.pool.generate([], self._more):
                with self._lock:
                    future = self._futures.pop(sample.index)
                future.set_result(sample.log_probs)
        except BaseException as error:
            self._fail(error)
        else:
            self._fail(_Closed())

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = error
            left, self._futures = list(self._futures.values()), {}
        for future in left:
            future.set_exception(error)

    def _more(self, engines_idle: bool) -> list[Request]:
        """Requests submitted since the last call; waits for one if the engines are idle."""
        found: list[Request] = []
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._queue.get(block=engines_idle and not found)
                if request is None:
                    raise _Closed
                found.append(request)
        return found

    def _unreadable(self, sequence: ToScore, token: int) -> TeacherError:
        return TeacherError(
            f"sample {sequence.name} has token {token} from the policy's padded vocabulary, but "
            f"the teacher's embedding has only {self._vocabulary} rows",
            raised=True,
        )


class _Closed(TeacherError):
    """The run ends."""

    def __init__(self) -> None:
        super().__init__("the run has ended, and so has its teacher")


class TeacherScores:
    """A teacher's scores of samples, requested as soon as their group is sampled. ``teacher``:
    scores."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        # By problem, place in the group and seed, which no two samples of a run share.
        self._futures: dict[tuple[str, int, int], Future[LogProbs]] = {}

    def submit(self, group: Group) -> None:
        """Have a group's samples scored, unless they were submitted before."""
        for one in sequences_of([group]):
            if _key(one) not in self._futures:
                self._futures[_key(one)] = self.teacher.submit(one)

    def take(self, groups: Sequence[Group]) -> list[LogProbs]:
        """The log-probs of all samples of the groups, in order; waits for them. Raises
        ComponentError: a sample could not be scored."""
        for group in groups:
            self.submit(group)
        sequences = sequences_of(groups)
        return check_scores(sequences, [self._futures.pop(_key(one)).result() for one in sequences])


def _key(sequence: ToScore) -> tuple[str, int, int]:
    sample = sequence.sample
    return sample.problem_id, sample.index, sample.seed


def sequences_of(groups: Iterable[Group]) -> list[ToScore]:
    return [
        ToScore(
            f"{group.problem.id}/{graded.sample.index}",
            group.problem.prompt_token_ids,
            graded.sample,
        )
        for group in groups
        for graded in group.samples
    ]


def _request(place: int, sequence: ToScore) -> Request:
    return Request(
        problem_id=sequence.name,
        index=place,
        prompt_token_ids=sequence.prompt_token_ids,
        max_tokens=len(sequence.sample.token_ids) + 1,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        begun=sequence.sample,
        scores=True,
    )


def check_scores(sequences: Sequence[ToScore], found: Sequence[Any]) -> list[LogProbs]:
    """Check that every token has a log-prob; minus infinity is allowed: a token ruled out."""
    for sequence, log_probs in zip(sequences, found, strict=True):
        wanted = len(sequence.sample.token_ids)
        given = 0 if log_probs is None else len(log_probs)
        if given != wanted or np.isnan(log_probs).any() or (log_probs > 1e-3).any():
            what = "invalid log-probabilities" if given == wanted else f"{given}"
            raise TeacherError(
                f"the teacher returned {what} for the {wanted} tokens of sample {sequence.name}",
                raised=True,
            )
    return list(found)
