"""Fakes for engines under a virtual clock: the pool's real assignment, without Ray or vLLM.

An engine's decode step takes ``step_s + sequence_s * sequences + token_s * tokens held``: the
weights are read once, and so are keys and values of every running sequence (Pope et al. 2022,
"Efficiently Scaling Transformer Inference"); where reading does not hide it, computing takes its
time for each sequence. Response lengths are given, as a sample's seed decides them. Prompts, and
what was begun of a response, cost ``prefill_token_s`` for each token, in which the engine decodes
nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmath.engines.requests import Progress, Request
from rlmath.rollout.episodes import Episodes
from rlmath.rollout.generation import Generation
from rlmath.types import ONE_TURN, Sample

# As in the step loop: how long an engine gathers more before it answers.
GATHER_S = 0.1


@dataclass
class VirtualEngine:
    """One engine: what it runs, and until when it has been worked out.

    All running sequences advance by a token a step, so that a sequence is known by the step at
    which it began and the one at which it ends.
    """

    index: int
    lengths: Callable[[Request], int]
    step_s: float
    token_s: float
    prefill_token_s: float = 0.0
    sequence_s: float = 0.0
    version: int = 0
    now_s: float = 0.0
    pace: float = 1.0  # Of what it could do alone.
    steps: float = 0.0
    running: list[tuple[float, float, int, Request]] = field(default_factory=list)
    started: float = 0.0  # Sum of the steps at which what runs would have begun in one go.
    added: int = 0
    finished: list[tuple[float, Sample]] = field(default_factory=list)
    generated: float = 0.0
    most_held: int = 0
    # The generation whose requests are cut, and the answer that is owed.
    cut_number: int = 0
    owes: _Answer | None = None

    def cut(self, number: int) -> None:
        """As ``RolloutEngine.cut``."""
        self.cut_number = number
        for _, start, _, request in sorted(self.running):
            tokens = max(request.begun_tokens, math.floor(self.steps - start + 1e-6))
            self.finished.append((self.now_s, self._sample(request, tokens)))
        self.running.clear()
        self.started = 0.0
        if self.owes is not None:
            self.owes.due = None

    def add(self, requests: Sequence[Request], number: int = 0) -> None:
        for request in requests:
            begun = request.begun_tokens
            start = self.steps - begun
            end = start + min(self.lengths(request), begun + request.new_tokens)
            self.added += 1  # Of requests that end together the first one comes first.
            heapq.heappush(self.running, (end, start, self.added, request))
            self.started += start
            if request.stays_on != self.index:
                read = len(request.prompt_token_ids) + begun
                self.now_s += self.prefill_token_s * read / self.pace
        self.most_held = max(self.most_held, len(self.running))
        if number and number == self.cut_number:
            self.cut(number)

    def advance(self, until_s: float) -> None:
        """Decode until a moment, sequence after sequence finished."""
        while self.running and self.now_s < until_s:
            left = self.running[0][0] - self.steps
            tokens = min(left, self._tokens_in(until_s - self.now_s))
            self.now_s += self._seconds_for(tokens)
            self.generated += tokens * len(self.running)
            self.steps += tokens
            while self.running and self.running[0][0] <= self.steps + 1e-6:
                end, start, _, request = heapq.heappop(self.running)
                self.started -= start
                self.finished.append((self.now_s, self._sample(request, round(end - start))))
            if tokens < left:
                break
        self.now_s = max(self.now_s, until_s)

    def next_finish_s(self) -> float:
        """When its next sequence ends, if nothing is added."""
        if self.finished:
            return self.finished[0][0]
        if not self.running:
            return math.inf
        return self.now_s + self._seconds_for(self.running[0][0] - self.steps)

    def _seconds_for(self, tokens: float) -> float:
        grown = tokens * len(self.running) / 2
        return tokens * (self._now_step_s() + self.token_s * grown) / self.pace

    def _tokens_in(self, seconds: float) -> float:
        a = self.token_s * len(self.running) / 2
        b = self._now_step_s()
        seconds *= self.pace
        return seconds / b if a == 0 else (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)

    def _now_step_s(self) -> float:
        """Seconds of a decode step with the tokens held now."""
        computed_s = self.step_s + self.sequence_s * len(self.running)
        return computed_s + self.token_s * self.tokens_held()

    def tokens_held(self) -> float:
        """Tokens of what runs."""
        return len(self.running) * self.steps - self.started

    def _sample(self, request: Request, tokens: int) -> Sample:
        spans = () if request.begun is None else request.begun.spans
        more = tokens > request.begun_tokens
        if not spans or (more and spans[-1][0] != self.version):
            spans = (*spans, (self.version, request.begun_tokens))
        return Sample(
            problem_id=request.problem_id,
            index=request.index,
            token_ids=_zeros(np.int32, tokens),
            log_probs=_zeros(np.float32, tokens),
            text="",
            finish_reason="stop" if tokens >= self.lengths(request) else "cut",
            spans=spans,
            seed=request.seed,
            engine=self.index,
            segments=ONE_TURN if request.begun is None else request.begun.segments,
            calls=() if request.begun is None else request.begun.calls,
        )


_shared_zeros: dict[type, NDArray[Any]] = {}


def _zeros(kind: type, length: int) -> NDArray[Any]:
    """A read-only part of one array that all samples share: hundreds of thousands are made."""
    zeros = _shared_zeros.get(kind)
    if zeros is None or len(zeros) < length:
        zeros = np.zeros(2 * length, kind)
        zeros.flags.writeable = False
        _shared_zeros[kind] = zeros
    return zeros[:length]


@dataclass(eq=False)
class _Answer:
    """A pending answer of an engine, due when a sample is finished, or without work or time."""

    engine: VirtualEngine
    asked_s: float
    timeout_s: float
    due: float | None = None

    def due_s(self) -> float:
        # Nothing but a cut, or another pace, changes an engine while it owes an answer.
        if self.due is None:
            self.due = self._due_s()
        return self.due

    def _due_s(self) -> float:
        first = self.engine.next_finish_s()
        if math.isinf(first):
            return self.asked_s
        left = len(self.engine.running) - (not self.engine.finished)
        at = first + GATHER_S if left > 0 else first
        return min(max(at, self.asked_s), self.asked_s + self.timeout_s)


class VirtualPool:
    """The part of a pool that ``Generation`` needs."""

    def __init__(
        self,
        engines: int,
        lengths: Callable[[Request], int],
        *,
        capacity: int = 256,
        step_s: float = 0.01,
        token_s: float = 0.0,
        prefill_token_s: float = 0.0,
        sequence_s: float = 0.0,
        episodes: Episodes | None = None,
    ) -> None:
        self._episodes = episodes
        self.now_s = 0.0
        # When the caller wants to look, and when nothing slows the engines any more.
        self.alarm_s = self.alone_s = math.inf
        self.generation: Generation | None = None
        self.spec = SimpleNamespace(max_running_sequences=capacity, max_sequence_tokens=10**9)
        self.engines_ = [
            VirtualEngine(i, lengths, step_s, token_s, prefill_token_s, sequence_s)
            for i in range(engines)
        ]
        self.processes = [self._process(engine) for engine in self.engines_]
        self.engines = tuple(process.handle for process in self.processes)

    def generate(
        self, requests: Sequence[Request], more: Any = None, journal: Any = None
    ) -> Iterator[Sample]:
        """As ``RolloutPool.generate``, with the pool's real assignment."""
        self.generation = one = self.begin(requests)
        yield from one.samples(more)

    def begin(
        self, requests: Sequence[Request], kind: type[Generation] = Generation, journal: Any = None
    ) -> Generation:
        """A round under the virtual clock, with its first requests."""
        number = 2 if self.generation is None else self.generation.number + 2
        pool: Any = self
        clock: dict[str, Any] = {"clock_s": lambda: self.now_s, "wait": self._wait}
        one = kind(pool, number, 1e12, journal, episodes=self._episodes, **clock)
        one.add(requests)
        return one

    def work_beside(self, share: float, until_s: float = math.inf) -> None:
        """From now on the engines lose a share of their time to what else works."""
        for engine in self.engines_:
            engine.advance(self.now_s)
            engine.pace = 1 - share
            if engine.owes is not None:
                engine.owes.due = None
        self.alone_s = until_s

    def take_weights(self, version: int, seconds: float) -> None:
        """The engines wait that long, and sample with weights of this version from then on."""
        self.now_s += seconds
        for engine in self.engines_:
            engine.advance(self.now_s)
            engine.version = version

    def starting(self) -> dict[Any, Any]:
        return {}

    def bring_up_started(self, starting: Any, ready: Any) -> list[Any]:
        return []

    def _process(self, engine: VirtualEngine) -> Any:
        def exchange(number: int, requests: Sequence[Request], timeout_s: float) -> _Answer:
            engine.advance(self.now_s)
            engine.add(requests, number)
            engine.owes = _Answer(engine, self.now_s, timeout_s)
            return engine.owes

        def cut(number: int) -> None:
            engine.advance(self.now_s)
            engine.cut(number)

        return SimpleNamespace(
            index=engine.index,
            can_sample=True,
            has_sampled=True,
            handle=SimpleNamespace(
                exchange=SimpleNamespace(remote=exchange),
                cut=SimpleNamespace(remote=cut),
                abort=SimpleNamespace(remote=lambda number: _Answer(engine, self.now_s, 0.0)),
            ),
            get=self._progress,
            end_of_log=lambda: "",
        )

    def _progress(self, answer: _Answer) -> Progress:
        engine = answer.engine
        engine.advance(self.now_s)
        samples = tuple(sample for _, sample in engine.finished)
        engine.finished.clear()
        return Progress(
            samples, len(engine.running), int(engine.generated), round(engine.tokens_held()), 0.0
        )

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[Any, Any]:
        assert num_returns in (1, len(refs))
        first = min(refs, key=_Answer.due_s, default=None)
        due_s = math.inf if first is None else first.due_s()
        until_s = min(self.now_s + timeout, self.alarm_s, self.alone_s)
        self.now_s = max(self.now_s, min(due_s, until_s))
        if self.now_s >= self.alone_s:
            self.work_beside(0.0)
            due_s = math.inf if first is None else first.due_s()
        ready = [first] if first is not None and due_s <= self.now_s + 1e-9 else []
        return ready, [ref for ref in refs if ref not in ready]
