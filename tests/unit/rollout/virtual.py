"""Stand-ins for engines under a virtual clock: the pool's real dealing, without Ray or vLLM.

An engine's decode step takes ``step_s + token_s * tokens held``: the weights are read once, and so
are keys and values of every running sequence (Pope et al. 2022, "Efficiently Scaling Transformer
Inference"). Response lengths are given, as a sample's seed decides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmath.rollout import generation
from rlmath.rollout.requests import Progress, Request
from rlmath.types import Sample

# As in the step loop: how long an engine gathers more before it answers.
GATHER_S = 0.1


@dataclass
class VirtualEngine:
    """One engine: what it runs, and until when it has been worked out."""

    index: int
    lengths: Callable[[Request], int]
    step_s: float
    token_s: float
    now_s: float = 0.0
    running: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # done, length
    finished: list[tuple[float, Sample]] = field(default_factory=list)
    generated: float = 0.0
    most_held: int = 0

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.running[request.key] = [0.0, float(self.lengths(request))]
        self.most_held = max(self.most_held, len(self.running))

    def advance(self, until_s: float) -> None:
        """Decode until a moment, sequence after sequence finished."""
        while self.running and self.now_s < until_s:
            left = min(length - done for done, length in self.running.values())
            tokens = min(left, self._tokens_in(until_s - self.now_s))
            self.now_s += self._seconds_for(tokens)
            self.generated += tokens * len(self.running)
            for state in self.running.values():
                state[0] += tokens
            for key in [k for k, (done, length) in self.running.items() if done > length - 1e-6]:
                del self.running[key]
                self.finished.append((self.now_s, self._sample(key)))
            if tokens < left:
                break
        self.now_s = max(self.now_s, until_s)

    def next_finish_s(self) -> float:
        """When its next sequence ends, if nothing is added."""
        if self.finished:
            return self.finished[0][0]
        if not self.running:
            return math.inf
        left = min(length - done for done, length in self.running.values())
        return self.now_s + self._seconds_for(left)

    def _seconds_for(self, tokens: float) -> float:
        held = sum(done for done, _ in self.running.values())
        grown = tokens * len(self.running) / 2
        return tokens * (self.step_s + self.token_s * (held + grown))

    def _tokens_in(self, seconds: float) -> float:
        held = sum(done for done, _ in self.running.values())
        a = self.token_s * len(self.running) / 2
        b = self.step_s + self.token_s * held
        return seconds / b if a == 0 else (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)

    def _sample(self, key: tuple[str, int]) -> Sample:
        return Sample(
            problem_id=key[0],
            index=key[1],
            token_ids=np.zeros(0, np.int32),
            log_probs=np.zeros(0, np.float32),
            text="",
            finish_reason="stop",
            weights_version=0,
            seed=0,
            engine=self.index,
        )


@dataclass(eq=False)
class _Answer:
    """What an engine owes: due when a sample is finished, it has no work, or the time is over."""

    engine: VirtualEngine
    asked_s: float
    timeout_s: float

    def due_s(self) -> float:
        first = self.engine.next_finish_s()
        if math.isinf(first):
            return self.asked_s
        left = len(self.engine.running) - (not self.engine.finished)
        at = first + GATHER_S if left > 0 else first
        return min(max(at, self.asked_s), self.asked_s + self.timeout_s)


class VirtualPool:
    """What ``Generation`` needs of a pool. Use :meth:`patch` before a round."""

    def __init__(
        self,
        engines: int,
        lengths: Callable[[Request], int],
        *,
        capacity: int = 256,
        step_s: float = 0.01,
        token_s: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.spec = SimpleNamespace(max_running_sequences=capacity, max_sequence_tokens=10**9)
        self.engines_ = [VirtualEngine(i, lengths, step_s, token_s) for i in range(engines)]
        self.processes = [self._process(engine) for engine in self.engines_]
        self.engines = tuple(process.handle for process in self.processes)
        self.answers: list[_Answer] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the module's clock and Ray's wait follow the virtual clock."""
        monkeypatch.setattr(generation, "ray", SimpleNamespace(wait=self._wait))
        monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def starting(self) -> dict[Any, Any]:
        return {}

    def bring_up_started(self, starting: Any, ready: Any) -> list[Any]:
        return []

    def _process(self, engine: VirtualEngine) -> Any:
        def exchange(number: int, requests: Sequence[Request], timeout_s: float) -> _Answer:
            engine.advance(self.now_s)
            engine.add(requests)
            return _Answer(engine, self.now_s, timeout_s)

        return SimpleNamespace(
            index=engine.index,
            starting=None,
            handle=SimpleNamespace(
                exchange=SimpleNamespace(remote=exchange),
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
        return Progress(samples, len(engine.running), int(engine.generated), 0.0)

    def _wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[Any, Any]:
        assert num_returns in (1, len(refs))
        due_s = min((ref.due_s() for ref in refs), default=math.inf)
        self.now_s = max(self.now_s, min(due_s, self.now_s + timeout))
        ready = [ref for ref in refs if ref.due_s() <= self.now_s + 1e-9][:1]
        return ready, [ref for ref in refs if ref not in ready]
