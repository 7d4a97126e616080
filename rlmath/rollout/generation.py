"""One round of sampling: a queue of requests for the engines, each answered exactly once.

Samples are assigned one by one, each to the engine with the least load, and never more than a fair
share to one engine. Load is in tokens: those that an engine holds, and those that its requests are
expected to add by the lengths seen in this round. Responses to one problem have similar lengths: a
group on one engine would keep that engine busy long after the others, and a round ends with its
last sample. Each sample has its own seed, so it does not depend on the engine that makes it.

``benchmarks/generation_schedule.py`` compares this with other assignments.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import ray

from rlmath.engines.requests import EngineError, Progress, Request, cut_sample
from rlmath.rollout.episodes import MAX_FAILED_SHARE, EnvironmentFailed, Episodes, awaiting
from rlmath.types import Sample

if TYPE_CHECKING:
    from rlmath.rollout.journal import StepJournal
    from rlmath.rollout.pool import RolloutPool

# An engine answers at least this often, so that a stall is seen and named.
ANSWER_EVERY_S = 5.0
ABORT_TIMEOUT_S = 1.0

# While an environment may answer turns: an engine takes requests only when it has answered.
TURNS_EVERY_S, LOOK_EVERY_S = 0.1, 0.02

# Gets whether no engine has work, and returns requests to add.
MoreRequests = Callable[[bool], Sequence[Request]]
# A request: the problem's id and the sample's index.
Key = tuple[str, int]


class Generation:
    """One call of :meth:`RolloutPool.generate` and its progress.

    Args:
        pool: The engines; restarts one that fails.
        number: Larger than the previous generation's: engines drop requests of older ones.
        stall_timeout_s: Seconds without a token after which an engine with work counts as hung.
        outlasts_engines: Wait until the round is cut, instead of failing, when no engine has the
            current weights any more.
        episodes: Answer the turns of requests that have a problem.
        clock_s: The clock; with ``wait``, replaced in simulations.
        wait: Waits for answers as ``ray.wait`` does.
    """

    def __init__(
        self,
        pool: RolloutPool,
        number: int,
        stall_timeout_s: float,
        journal: StepJournal | None = None,
        *,
        outlasts_engines: bool = False,
        episodes: Episodes | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[..., tuple[list[Any], list[Any]]] = ray.wait,
    ) -> None:
        self._pool = pool
        self._clock_s, self._wait = clock_s, wait
        self._outlasts_engines = outlasts_engines
        self._journal = journal
        # Samples that no engine has to make: the journal had them, or the round was cut.
        self._found: list[Sample] = []
        self._is_cut = threading.Event()
        self.number = number
        self._stall_timeout_s = stall_timeout_s
        every_s = ANSWER_EVERY_S if episodes is None else TURNS_EVERY_S
        self._answer_every_s = min(every_s, stall_timeout_s / 4)
        self._episodes = episodes
        self._failed = self._num_requests = 0
        engines = len(pool.processes)
        # Requests of each engine, by key.
        self.held: list[dict[Key, Request]] = [{} for _ in range(engines)]
        self.tokens = [0] * engines  # Response tokens of each engine since its start.
        # Tokens of each engine's unfinished requests at its last answer.
        self.tokens_held = [0] * engines
        # Number of each engine's finished samples, and their tokens.
        self.finished = [0] * engines  # Number of each engine's finished samples.
        self.finished_tokens = [0] * engines  # Response tokens of these.
        # Tokens of continued responses and their prompts whose keys and values the engines still
        # had.
        self.tokens_reused = 0
        self._longest = 1
        self._queue: deque[Request] = deque()
        # Whether any request stays on an engine, and whether such a request may be in the queue.
        self._some_stay = self._queue_stays = False
        self._unfinished: dict[Key, Request] = {}
        # The pending answer of each busy engine, and the engines that owe one.
        self._answers: dict[Any, int] = {}
        self._owing: set[int] = set()
        # Seconds spent waiting for any answer, now and when each engine was asked: the driver's
        # other work is not counted against engines.
        self._waited_s = 0.0
        self._waited_before_s = [0.0] * engines
        self._next_check_s = self._answer_every_s
        self.idle_s = [0.0] * engines  # Seconds of this round that each engine had no work.
        self.duration_s = 0.0  # From the first request to the last sample; 0 until then.
        self._began_s = self._clock_s()
        self._idle_since_s: list[float | None] = [self._began_s] * engines

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests at the end of the queue. Raises ValueError: two requests have one key, or
        one is longer than the engines' sequences."""
        new = {request.key for request in requests} - self._unfinished.keys()
        if len(new) != len(requests):
            raise ValueError(
                f"{len(requests)} requests have {len(new)} new keys (problem id, index): the keys "
                "of unfinished requests must differ"
            )
        self._refuse_overlong(requests)
        self._num_requests += len(requests)
        if self._episodes is not None:
            prepared = self._episodes.prepare
            requests = [one if one.problem is None else prepared(one) for one in requests]
        self._unfinished |= {request.key: request for request in requests}
        if any(request.stays_on is not None for request in requests):
            self._some_stay = self._queue_stays = True
        self._longest = max([self._longest, *(request.new_tokens for request in requests)])
        for request in requests:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        """Have a request answered: by the journal, by its environment, or by an engine."""
        found = None if self._journal is None else self._journal.find(request)
        is_asked = request.begun is not None and request.begun.awaits_observation
        if found is not None and is_asked:
            self._continue_observed(request, found)
        elif found is not None:
            self._found.append(found)
        elif is_asked:
            assert self._episodes is not None
            self._episodes.ask(request)
        else:
            self._queue.append(request)

    def samples(self, more: MoreRequests | None) -> Iterator[Sample]:
        """Yield the samples; see :meth:`RolloutPool.generate`."""
        try:
            self._assign()
            while True:
                if self._is_cut.is_set():
                    self._found += [cut_sample(request) for request in self._queue]
                    self._queue.clear()
                if more is not None and (new := more(self._idle)):
                    self.add(new)
                    self._assign()
                if self._found:
                    samples, self._found = self._found, []
                elif self._idle:
                    break
                else:
                    samples = self._next_answers()
                samples = self._through_episodes(samples)
                # Engines first, so that they work while the caller handles the samples.
                self._assign()
                for sample in samples:
                    del self._unfinished[sample.problem_id, sample.index]
                    yield sample
            if self._unfinished:
                left = sorted(self._unfinished)
                raise EngineError(f"{len(left)} requests got no sample: {left}")
        finally:
            self._end_of_round()
            if self._unfinished and self._episodes is not None:
                self._episodes.drop()
            if any(self.held):
                self._abort()

    def cut(self) -> None:
        """End the round soon, cutting unfinished samples where they are; from any thread.

        From then on ``more`` has to return nothing.
        """
        self._is_cut.set()
        for engine in self._pool.processes:
            # An engine that cannot answer is found as at any other time.
            if engine.can_sample:
                engine.handle.cut.remote(self.number)

    @property
    def _idle(self) -> bool:
        waits = self._episodes is not None and self._episodes.waits
        return not (self._answers or self._queue or self._found or waits)

    @property
    def unfinished(self) -> int:
        """Number of requests without a sample."""
        return len(self._unfinished)

    def idle_share(self) -> float:
        """Share of the engines' time in this round in which they had no work, from 0 to 1."""
        if not self.duration_s:
            return 0.0
        return sum(self.idle_s) / (self.duration_s * len(self.idle_s))

    def metrics(self) -> dict[str, float]:
        """``rollout/idle_share``, ``rollout/idle_share_max`` of the idlest engine and, where
        responses stay on their engines, ``rollout/reused_kv_tokens``.

        Empty before the round's end, or if engines were asked for nothing.
        """
        if not self.duration_s or not any(self.finished):
            return {}
        reused = {"rollout/reused_kv_tokens": float(self.tokens_reused)} if self._some_stay else {}
        return reused | {
            "rollout/idle_share": self.idle_share(),
            "rollout/idle_share_max": max(self.idle_s) / self.duration_s,
        }

    def summary(self) -> dict[str, Any]:
        """The round's seconds, and each engine's samples, tokens and idle seconds."""
        engines = [
            {"engine": index, "samples": samples, "tokens": tokens, "idle_s": round(idle_s, 3)}
            for index, (samples, tokens, idle_s) in enumerate(
                zip(self.finished, self.finished_tokens, self.idle_s, strict=True)
            )
        ]
        return {"seconds": round(self.duration_s, 3), "engines": engines}

    def _assign(self) -> None:
        """Assign requests to the free engines, and ask all busy ones for an answer."""
        processes = self._pool.processes
        free = [i for i, one in enumerate(processes) if i not in self._owing and one.can_sample]
        dealt: dict[int, list[Request]] = {index: [] for index in free}
        if self._queue and not self._is_cut.is_set():
            for index, request in chain(self._choose_same(free), self._choose(free)):
                self.held[index][request.key] = request
                dealt[index].append(replace(request, problem=None) if request.problem else request)
        for index in free:
            if self.held[index]:
                self._note_work(index)
                answer = processes[index].handle.exchange.remote(
                    self.number, dealt[index], self._answer_every_s
                )
                self._answers[answer] = index
                self._owing.add(index)
                self._waited_before_s[index] = self._waited_s

    def _choose_same(self, free: Sequence[int]) -> Iterator[tuple[int, Request]]:
        """Requests from the queue that stay on an engine which is free now; others that should stay
        go where all go."""
        if not self._queue_stays:
            return
        self._queue_stays = False
        most, rest = self._pool.spec.max_running_sequences, deque[Request]()
        for request in self._queue:
            index = request.stays_on
            if index is not None and index in free and len(self.held[index]) < most:
                yield index, request
            else:
                self._queue_stays |= index is not None
                rest.append(request)
        self._queue = rest

    def _choose(self, free: Sequence[int]) -> Iterator[tuple[int, Request]]:
        """Requests from the queue, each with the engine that gets it.

        Args:
            free: Engines that can be given requests now. The others owe an answer and take their
                share when they give it, in seconds; they still have work, or they would have
                answered.
        """
        alive = [i for i, one in enumerate(self._pool.processes) if one.can_sample]
        rest = self.expected_rest()
        loads = {index: self.load(index, rest) for index in alive}
        share = (sum(loads.values()) + rest * len(self._queue)) / max(1, len(alive))
        most = self._pool.spec.max_running_sequences
        heap = [(loads[index], index) for index in free]
        heapq.heapify(heap)
        while self._queue and heap and heap[0][0] < share:
            load, index = heap[0]
            if len(self.held[index]) >= most:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (load + rest, index))
            yield index, self._queue.popleft()

    def load(self, index: int, rest: float) -> float:
        """Tokens that an engine holds plus those that its requests are expected to add. ``rest``:
        See :meth:`expected_rest`."""
        return self.tokens_held[index] + rest * len(self.held[index])

    def expected_rest(self) -> float:
        """Expected further tokens of an unfinished request, however many it has.

        All tokens of finished and unfinished samples over the number of finished samples: the
        estimate for exponential lifetimes with censoring. While nothing is finished, all requests
        count alike.
        """
        finished = sum(self.finished)
        if not finished:
            return float(self._longest)
        return max(1.0, (sum(self.finished_tokens) + sum(self.tokens_held)) / finished)

    def _note_work(self, index: int) -> None:
        self._note_work_at(index, self._clock_s())

    def _note_work_at(self, index: int, now_s: float) -> None:
        since, self._idle_since_s[index] = self._idle_since_s[index], None
        if since is not None:
            self.idle_s[index] += now_s - since

    def _note_idle(self, index: int) -> None:
        if not self.held[index] and self._idle_since_s[index] is None:
            self._idle_since_s[index] = self._clock_s()

    def _end_of_round(self) -> None:
        now_s = self._clock_s()
        self.duration_s = now_s - self._began_s
        for index in range(len(self.held)):
            self._note_work_at(index, now_s)

    def _through_episodes(self, samples: list[Sample]) -> list[Sample]:
        """The samples that have ended or are cut, after each other's turns went to the environment
        and what came back from there went to the queue."""
        episodes = self._episodes
        if episodes is None:
            return samples
        out = []
        for sample in samples:
            request = self._unfinished[sample.problem_id, sample.index]
            if request.problem is None or not episodes.ends_turn(sample):
                out.append(sample)
            else:
                self._enqueue(replace(request, begun=awaiting(sample)))
        only_turns = not (self._answers or self._queue or self._found or out)
        for request, sample in episodes.outcomes(LOOK_EVERY_S if only_turns else 0.0):
            if sample.finish_reason != "cut":
                out.append(sample)
                self._count_failed(sample)
                continue
            if self._journal is not None:
                self._journal.keep(request, sample)
            self._continue_observed(request, sample)
        if self._is_cut.is_set():
            out += episodes.cut()
        return [episodes.finish(one) for one in out]

    def _continue_observed(self, request: Request, sample: Sample) -> None:
        """Continue a request's sample, which has its observation, if the round allows it."""
        first = self._unfinished[request.key]
        left = first.budget_tokens
        if left is not None:
            left -= len(sample.token_ids) - first.begun_tokens
        if left is not None and left < 1:
            self._found.append(sample)
        else:
            self._enqueue(replace(request, begun=sample, budget_tokens=left))

    def _count_failed(self, sample: Sample) -> None:
        self._failed += sample.failure is not None
        if self._failed > max(1.0, MAX_FAILED_SHARE * self._num_requests):
            raise EnvironmentFailed(
                f"{self._failed} of {self._num_requests} samples failed because tools or "
                f"the environment did not work, more than {MAX_FAILED_SHARE:.0%}; the last one: "
                f"sample {sample.index} of problem {sample.problem_id}: {sample.failure}. Nothing "
                "is wrong with what the model wrote: fix that, then resume the run"
            )

    def _next_answers(self) -> list[Sample]:
        """Wait for an engine's answer; restart engines that failed or hang."""
        waiting_since = self._clock_s()
        starting = self._pool.starting()
        waits = self._episodes is not None and self._episodes.waits
        if waits and not self._answers and not starting:
            return []  # Nothing but turns is awaited.
        if not self._answers and not starting:
            if self._outlasts_engines:
                self._is_cut.wait(self._answer_every_s)
                return []
            raise EngineError(
                f"{self.unfinished} samples are unfinished, and no engine has weights version "
                f"{self._pool.weights_version} any more: restarted engines wait for the next "
                "weight sync, because the actor is past that version"
            )
        owed = [*self._answers, *starting]
        timeout_s = LOOK_EVERY_S if waits else self._answer_every_s
        ready, others = self._wait(owed, num_returns=1, timeout=timeout_s)
        self._waited_s += self._clock_s() - waiting_since
        if ready and others:
            # With hundreds of engines, many have answered since the last look.
            more, _ = self._wait(others, num_returns=len(others), timeout=0)
            ready = [*ready, *more]
        samples: list[Sample] = []
        for ref in ready:
            if ref in starting:
                continue
            index = self._pop_answer(ref)
            try:
                samples += self._take(ref, index)
            except EngineError as error:
                self._replace(index, error)
        if self._waited_s >= self._next_check_s:
            self._next_check_s = self._waited_s + self._answer_every_s / 4
            self._replace_stalled()
        for index, why in self._pool.bring_up_started(starting, ready):
            self._replace(index, why)
        return samples

    def _pop_answer(self, ref: Any) -> int:
        """Remove a pending answer; the index of the engine that owed it."""
        index = self._answers.pop(ref)
        self._owing.discard(index)
        return index

    def _replace_stalled(self) -> None:
        """Restart engines whose answers are overdue."""
        for ref, index in list(self._answers.items()):
            waited_s = self._waited_s - self._waited_before_s[index]
            try:
                self._check_stall(index, waited_s, len(self.held[index]))
            except EngineError as error:
                self._pop_answer(ref)
                self._replace(index, error)

    def _take(self, ref: Any, index: int) -> Sequence[Sample]:
        """The samples of an engine's answer; nothing has changed when it raises."""
        engine, held = self._pool.processes[index], self.held[index]
        progress: Progress = engine.get(ref)
        self.tokens[index] = progress.tokens_generated
        engine.has_sampled = engine.has_sampled or progress.tokens_generated > 0
        left = held.keys() - {(sample.problem_id, sample.index) for sample in progress.samples}
        if left and not progress.unfinished:
            raise EngineError(
                f"{self._pool.spec.role} {index} is idle, but {len(left)} of its samples are "
                f"missing: {sorted(left)[:5]}" + engine.end_of_log()
            )
        self.tokens_held[index] = progress.tokens_held
        self.tokens_reused += progress.tokens_reused
        for sample in progress.samples:
            request = held.pop((sample.problem_id, sample.index))
            if self._journal is not None:
                self._journal.keep(request, sample)
            self.finished[index] += 1
            self.finished_tokens[index] += len(sample.token_ids)
        self._note_idle(index)
        # Its finished samples count even if it hangs with the rest, which the next call sees.
        if not progress.samples:
            self._check_stall(index, progress.quiet_s, progress.unfinished)
        return progress.samples

    def _replace(self, index: int, error: EngineError) -> None:
        """Restart an engine; its requests go back to the head of the queue.

        The requests keep their seeds, so that their samples are the same. Raises EngineError: no
        restarts are left.
        """
        held = self.held[index]
        self._pool.replace(index, error, unfinished=len(held))
        self._queue.extendleft(reversed(held.values()))
        held.clear()
        self.tokens_held[index] = 0
        self._note_idle(index)

    def _check_stall(self, index: int, quiet_s: float, unfinished: int) -> None:
        held: Mapping[Key, Request] = self.held[index]
        if quiet_s <= self._stall_timeout_s or not held:
            return
        oldest = next(iter(held.values()))
        raise EngineError(
            f"{self._pool.spec.role} {index} has produced no token for {quiet_s:.0f} s "
            f"(rollout.stall_timeout_s={self._stall_timeout_s:g}) with {unfinished} unfinished "
            f"requests; the oldest is sample {oldest.index} of problem {oldest.problem_id}"
            + self._pool.processes[index].end_of_log()
        )

    def _refuse_overlong(self, requests: Sequence[Request]) -> None:
        longest = self._pool.spec.max_sequence_tokens
        for request in requests:
            prompt = len(request.prompt_token_ids)
            if prompt + request.max_tokens > longest:
                raise ValueError(
                    f"{request.problem_id}: a prompt of {prompt} and a response of up to "
                    f"{request.max_tokens} tokens make {prompt + request.max_tokens}, more than "
                    f"the engines' longest sequence of {longest}"
                )

    def _abort(self) -> None:
        """After an early end, remove all requests from engines, now or when they wake up."""
        refs = [engine.abort.remote(self.number) for engine in self._pool.engines]
        owed = [*refs, *self._answers]
        self._wait(owed, num_returns=len(owed), timeout=ABORT_TIMEOUT_S)
