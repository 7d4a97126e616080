"""The environment's side of rollouts: it answers the model's turns while engines sample others.

A turn that ended is asked in a thread. What comes of it is the sample with the observation
appended, for an engine to continue, or the sample as it ends. Nothing here decodes and encodes what
the model said: its tokens stay, and an observation's tokens are added after them.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlmath.engines.requests import Request
from rlmath.environments.base import (
    End,
    Environment,
    Episode,
    Observation,
    Suffix,
    Turn,
    TurnFormat,
)
from rlmath.errors import InfrastructureError, UserError
from rlmath.types import ONE_TURN, FinishReason, Problem, Sample, SegmentKind
from rlmath.utils.daemon_threads import DaemonThreads

# A turn is given again to an environment that does not work so often at least, and for so long, at
# longer and longer pauses: its server may be starting. That is no time of the sample's calls.
TRIES, RETRY_AFTER_S, RETRY_FOR_S = 3, 0.5, 30.0
# Share of a round's samples that may fail for that reason; one always may.
MAX_FAILED_SHARE = 0.05

_Key = tuple[str, int, int]
# Kind of segment that a truncated sample awaits; otherwise glue would come first.
_TRUNCATED: SegmentKind = "observation"


class EnvironmentFailed(UserError):
    """Too many samples failed because their environment did not work."""


@dataclass
class _Stay:
    """A sample's stay in the environment, over its turns."""

    problem: Problem  # The sample's.
    episode: Episode | None = None  # None: to be begun.
    answered: int = 0  # Number of the model's turns that it knows.
    spent_s: float = 0.0  # Seconds that its answers took.
    is_over: bool = False  # The sample has left the round; a later answer is dropped.


@dataclass
class _Asked:
    """A turn that was given to the environment."""

    request: Request  # Its started sample waits for the observation.
    stay: _Stay  # The sample's.
    since_s: float | None = None  # When its answer began; None: it waits, for a thread or a retry.
    outcome: Sample | None = None  # The answered sample, if nobody waited for it.
    is_late: bool = False  # Its thread was replaced.

    @property
    def begun(self) -> Sample:
        assert self.request.begun is not None
        return self.request.begun


class Episodes:
    """Episodes of all running samples. One thread calls its methods.

    Args:
        environment: Answers turns; closed by :meth:`close`.
        turn_format: How answers become tokens.
        decode: Text of tokens, without special ones.
        max_turns: The model's turns; a sample whose last one still calls a tool is truncated.
        wall_s: Seconds that all answers to a sample may take together; then it is truncated, and
            the call is left behind.
        parallel: Number of turns that are answered at once.
    """

    def __init__(
        self,
        environment: Environment,
        turn_format: TurnFormat,
        decode: Callable[[Sequence[int]], str],
        *,
        max_turns: int,
        wall_s: float,
        parallel: int,
    ) -> None:
        self._environment, self._format, self._decode = environment, turn_format, decode
        self._max_turns, self._wall_s = max_turns, wall_s
        self._threads = DaemonThreads(parallel, "environment")
        self._done: queue.SimpleQueue[tuple[_Asked, Sample]] = queue.SimpleQueue()
        self._down_since_s = math.inf  # No answer has come since then.
        self._stays: dict[_Key, _Stay] = {}
        self._waiting: dict[_Key, _Asked] = {}
        # Asked in a round that was cut; the next one asks again, and gets the same answer.
        self._parked: dict[_Key, _Asked] = {}

    def ends_turn(self, sample: Sample) -> bool:
        """Whether the environment is to be asked about an engine's sample: the model has ended its
        turn, or is truncated and gets a reward."""
        truncated = sample.finish_reason == "length" and self._environment.gives_reward
        return truncated or sample.finish_reason == "stop"

    @property
    def waits(self) -> bool:
        """Whether a turn is to be answered."""
        return bool(self._waiting)

    def waiting(self) -> list[tuple[str, int]]:
        """Problem and index of the samples whose turns are being answered. Thread-safe."""
        return [(one.begun.problem_id, one.begun.index) for one in list(self._waiting.values())]

    def prepare(self, request: Request) -> Request:
        """A request whose turns end where the format says."""
        return replace(request, stop=self._format.stop)

    def ask(self, request: Request) -> None:
        """Have the turn answered that ended a request's begun sample."""
        assert request.begun is not None
        key = _key(request.begun)
        asked = self._parked.pop(key, None)
        if asked is not None and np.array_equal(asked.begun.token_ids, request.begun.token_ids):
            asked.request = request
            self._waiting[key] = asked
            if asked.outcome is not None:
                self._done.put((asked, asked.outcome))
            return
        assert request.problem is not None
        # In a resumed run, the seconds of the calls before it count.
        spent_s = sum(seconds for _, _, seconds in request.begun.calls)
        stay = self._stays.setdefault(key, _Stay(request.problem, spent_s=spent_s))
        asked = _Asked(request, stay)
        self._waiting[key] = asked
        self._threads.submit(self._answer, asked)

    def outcomes(self, timeout_s: float = 0.0) -> list[tuple[Request, Sample]]:
        """Answered turns since the last call: each request with its sample, which is ``cut`` where
        an engine is to continue it. ``timeout_s``: longest wait for the first."""
        found = []
        while True:
            try:
                asked, sample = self._done.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                break
            timeout_s = 0.0
            key = _key(asked.begun)
            if self._waiting.get(key) is asked:
                del self._waiting[key]
                found.append((asked.request, sample))
            elif self._parked.get(key) is asked:
                asked.outcome = sample
        return found + self._overdue()

    def cut(self) -> list[Sample]:
        """The samples whose turns are not answered yet, as cut ones. Their calls continue."""
        cut = list(self._waiting.values())
        self._parked |= self._waiting
        self._waiting = {}
        return [asked.begun for asked in cut]

    def finish(self, sample: Sample) -> Sample:
        """A sample that leaves the round, with the texts of its segments if it has ended."""
        if sample.finish_reason == "cut":
            return sample
        self._leave(_key(sample))
        if sample.segments[-1][1] == len(sample.token_ids) > 0:
            sample = replace(sample, segments=sample.segments[:-1])
        if sample.segments == ONE_TURN:
            return sample
        ids = sample.token_ids.tolist()
        return replace(sample, texts=tuple(self._decode(ids[a:b]) for _, a, b in sample.pieces()))

    def drop(self) -> None:
        """End all episodes: their round has failed."""
        for key in list(self._stays):
            self._leave(key)

    def close(self) -> None:
        """End all episodes and the environment; calls that hang are left behind."""
        self._threads.close()
        self.drop()
        self._environment.close()

    def _overdue(self) -> list[tuple[Request, Sample]]:
        """Samples whose answers take too long, truncated."""
        now_s, found = time.monotonic(), []
        for key, asked in list(self._waiting.items()):
            since_s = asked.since_s  # Its thread may change it at any time.
            if since_s is None:
                continue
            if now_s - since_s + asked.stay.spent_s > self._wall_s:
                self._leave(key)
                asked.is_late = True
                self._threads.add_one()  # That thread may never come back.
                calls = asked.begun.calls
                if not _is_truncated(asked.begun):
                    calls = (*calls, ("environment", "timeout", round(now_s - since_s, 6)))
                sample = replace(asked.begun, finish_reason="length", calls=calls)
                found.append((asked.request, sample))
        return found

    def _leave(self, key: _Key) -> None:
        self._waiting.pop(key, None)
        self._parked.pop(key, None)
        stay = self._stays.pop(key, None)
        if stay is not None:
            stay.is_over = True
            episode = stay.episode  # Its thread may change it at any time.
            if episode is not None:
                episode.close()

    # The following methods run in the threads.

    def _answer(self, asked: _Asked) -> None:
        try:
            sample = self._try(asked)
        except BaseException as error:  # A tool may well end its interpreter.
            said = f"{type(error).__name__}: {error}"
            sample = replace(asked.begun, finish_reason="failed", failure=said)
        self._done.put((asked, sample))
        if asked.is_late:
            self._threads.end_one()

    def _try(self, asked: _Asked) -> Sample:
        stay, failures, first_s = asked.stay, 0, math.inf
        while True:
            asked.since_s = began_s = time.monotonic()
            try:
                sample = self._outcome(asked.begun, asked.request.max_tokens, stay)
            except InfrastructureError:
                self._end(stay)
                if stay.is_over:  # Which says nothing about the environment.
                    raise
                failures, now_s = failures + 1, time.monotonic()
                first_s = min(first_s, now_s)
                # Where nothing has worked for that long, each sample gets a few tries only.
                self._down_since_s = min(self._down_since_s, now_s)
                is_down = now_s - min(first_s, self._down_since_s) >= RETRY_FOR_S
                if failures >= TRIES and is_down:
                    raise
            else:
                asked.since_s = None  # Before the next line, so that they are not counted twice.
                stay.spent_s += time.monotonic() - began_s
                self._down_since_s = math.inf
                return sample
            finally:
                asked.since_s = None
            # The model's code itself may break a sandbox, so each pause is twice the last.
            time.sleep(RETRY_AFTER_S * min(2 ** (failures - 1), 16))

    def _outcome(self, begun: Sample, max_tokens: int, stay: _Stay) -> Sample:
        turns = self._turns(begun)
        answer = self._respond(begun, turns, stay)
        if isinstance(answer, End):
            reason: FinishReason = "length" if _is_truncated(begun) else "stop"
            return replace(begun, finish_reason=reason, environment_reward=answer.reward)
        lost = [r for r in answer.results if r.status == "infrastructure"]
        if lost:
            raise InfrastructureError(f"{lost[0].name}: {lost[0].text}")
        calls = (*begun.calls, *((r.name, r.status, round(r.seconds, 6)) for r in answer.results))
        begun, results, last = replace(begun, calls=calls), answer.results, turns[-1].text
        if answer.is_reply:
            suffix = self._format.reply(last, results[0].text)
        else:
            suffix = self._format.suffix(last, results)
        sample = _extend(begun, suffix)
        if len(turns) >= self._max_turns or len(sample.token_ids) >= max_tokens:
            assert stay.episode is not None
            reward = stay.episode.reward()
            return replace(begun, finish_reason="length", environment_reward=reward)
        return sample

    def _respond(self, sample: Sample, turns: Sequence[Turn], stay: _Stay) -> Observation | End:
        # The environment sees no turn that is truncated.
        complete = turns[: len(turns) - _is_truncated(sample)]
        if stay.answered >= len(turns):
            self._end(stay)
        _check_stays(stay)
        if stay.episode is None:
            stay.episode = self._environment.begin(stay.problem, sample.index)
            stay.answered = 0
        _check_stays(stay)
        answer: Observation | End | None = None
        missed = complete[stay.answered :] if self._environment.has_state else complete[-1:]
        for turn in missed:
            _check_stays(stay)
            answer = stay.episode.respond(turn)
            stay.answered = turn.number + 1
        if _is_truncated(sample):
            return End(stay.episode.reward())
        assert answer is not None
        return answer

    def _turns(self, sample: Sample) -> list[Turn]:
        spans = [(a, b) for kind, a, b in sample.pieces() if kind == "model"]
        pieces = [sample.token_ids[a:b].tolist() for a, b in spans]
        before = 0 if self._environment.has_state else len(sample.calls)
        return [Turn(number, ids, self._decode(ids), before) for number, ids in enumerate(pieces)]

    def _end(self, stay: _Stay) -> None:
        episode, stay.episode = stay.episode, None
        if episode is not None:
            episode.close()


def awaiting(sample: Sample) -> Sample:
    """A sample whose turn has ended or is truncated, until the environment has answered."""
    kind: SegmentKind = _TRUNCATED if sample.finish_reason == "length" else "glue"
    end = (kind, len(sample.token_ids))
    return replace(sample, finish_reason="cut", segments=(*sample.segments, end))


def _check_stays(stay: _Stay) -> None:
    if stay.is_over:
        raise InfrastructureError("the sample has ended")


def _is_truncated(sample: Sample) -> bool:
    """Whether a sample that awaits an answer gets no further turn."""
    return sample.segments[-1][0] == _TRUNCATED


def _extend(sample: Sample, suffix: Suffix) -> Sample:
    """A sample that awaits an observation, with it; the model's next turn follows."""
    first, (a, b), count = len(sample.token_ids), suffix.observation, len(suffix.token_ids)
    if not 0 <= a <= b <= count:
        raise ValueError(f"an observation at {a} to {b} of {count} tokens")
    parts: list[tuple[SegmentKind, int, int]] = [
        *(("glue", 0, a), ("observation", a, b), ("glue", b, count))
    ]
    added = [(kind, first + start) for kind, start, end in parts if start < end]
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.array(suffix.token_ids, np.int32)]),
        log_probs=np.concatenate([sample.log_probs, np.zeros(count, np.float32)]),
        segments=(*sample.segments[:-1], *added, ("model", first + count)),
    )


def _key(sample: Sample) -> _Key:
    return sample.problem_id, sample.index, sample.seed
