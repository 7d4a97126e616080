"""Grade responses: find the answer, compare it here, ask a worker when that is not enough."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlmath.errors import UserError
from rlmath.grading.answer import Answer, is_answer, read
from rlmath.grading.compare import Comparer
from rlmath.grading.disagreements import DisagreementFile
from rlmath.grading.extract import extract
from rlmath.grading.gold import inspect
from rlmath.grading.pool import Result, WorkerPool, Workers
from rlmath.grading.result import STATUSES, GoldReport, Grade, Status
from rlmath.grading.settings import TASKS, GradingSettings
from rlmath.grading.verifiers import VERIFIERS

Gold = str | int | float | Sequence[str] | None  # None is a bad gold
Outcome = tuple[Status, str]  # status and method
_Key = tuple[str, str, str]
_MAX_KEY_CHARS = 2_000  # longer answers are not worth remembering


@dataclasses.dataclass(slots=True)
class _Request:
    """One response on its way to a grade.

    Attributes:
        gold: the first accepted answer that can be used.
        text: the answer that was found.
    """

    future: Future[Grade]
    task: str
    started: float
    gold: str | None
    text: str | None = None
    untabled: bool = False


class MathGrader:
    """Grades responses against accepted answers, with worker processes for the hard ones.

    Use it as a context manager. It is thread-safe, and may be used inside Ray actors.

    Args:
        num_workers: worker processes for the symbolic layer.
        timeout_s: limit on one symbolic check, from the start of its job.
        settings: all other settings; the keyword arguments replace its fields.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_s: float | None = None,
        *,
        settings: GradingSettings | None = None,
        **changes: Any,
    ) -> None:
        if num_workers is not None:
            changes["num_workers"] = num_workers
        if timeout_s is not None:
            changes["timeout_s"] = timeout_s
        self.settings = dataclasses.replace(settings or GradingSettings(), **changes)
        # The layer of the workers.
        self._layer = "sympy" if self.settings.verifier is None else "verifier"
        self._comparer = threading.local()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._cache: dict[_Key, Outcome] = {}
        self._golds: dict[tuple[str, str], tuple[Answer, GoldReport]] = {}
        self._in_flight: dict[_Key, Future[Result]] = {}
        self._pool: Workers | None = None
        self._pool_pid = 0
        self._closed = False
        path = self.settings.disagreement_path
        self._disagreements = DisagreementFile(path) if path else None
        self._random = random.Random(0)

    def __enter__(self) -> MathGrader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the worker processes in the background, before the first job needs them."""
        self._workers()

    def use_workers(self, workers: Workers) -> None:
        """Use these workers from now on, and end the grader's own processes; an error while a
        grade is pending. The grader closes the workers."""
        with self._lock:
            before, self._pool = self._pool, workers
            own, self._pool_pid = self._pool_pid == os.getpid(), os.getpid()
        if before is not None and own:
            before.close()

    def close(self) -> None:
        """Kill the worker processes. Grading that needs them is an error from now on."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None and self._pool_pid == os.getpid():
            pool.close()

    def counts(self) -> dict[str, int]:
        """Number of grades so far, per status."""
        with self._lock:
            return {status: self._counts[status] for status in STATUSES}

    def worker_pids(self) -> list[int]:
        return [] if self._pool is None else self._pool.pids()

    def check_gold(self, gold: str, task: str = "math") -> GoldReport:
        """Read and classify one accepted answer; see `check_gold`."""
        return self._gold(gold, task)[1]

    # -- grading

    def grade_one(self, response: str, gold: Gold, *, task: str = "math") -> Grade:
        """Grade one response; waits for a worker if one is needed."""
        return self.submit(response, gold, task=task).result()

    def grade_batch(
        self, responses: Sequence[str], golds: Sequence[Gold], *, task: str = "math"
    ) -> list[Grade]:
        """Grade many responses; the grades are in their order.

        Raises:
            ValueError: the two lists differ in length.
        """
        if len(responses) != len(golds):
            raise ValueError(f"{len(responses)} responses for {len(golds)} gold answers")
        futures = [self.submit(r, g, task=task) for r, g in zip(responses, golds, strict=True)]
        return [future.result() for future in futures]

    def submit(self, response: str, gold: Gold, *, task: str = "math") -> Future[Grade]:
        """Begin to grade one response, from any thread; most futures are done on return.

        Raises:
            ValueError: `task` is not one of `TASKS`.
        """
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}")
        if isinstance(gold, str | int | float):
            golds = [str(gold)]
        else:
            golds = [str(g) for g in gold or () if g is not None]
        request = _Request(Future(), task, time.perf_counter(), golds[0] if golds else None)
        try:
            self._begin(response, golds, request)
        except Exception as error:  # a grade is counted whatever the text does to us
            self._finish(request, "error", type(error).__name__)
        return request.future

    def _begin(self, response: str, golds: list[str], request: _Request) -> None:
        if self.settings.verifier is not None:
            self._begin_verifying(response, golds, request)
            return
        known = {gold: self._gold(gold, request.task) for gold in golds}
        usable = {gold: answer for gold, (answer, report) in known.items() if report.usable}
        if not usable:
            self._finish(request, "bad_gold", "gold")
            return
        request.gold = next(iter(usable))
        found = extract(
            response,
            self.settings.fallback,
            task=request.task,
            boxes=max(gold.boxes for gold in usable.values()),
            ordered=any(g.boxes > 1 and g.text.startswith("(") for g in usable.values()),
            items=max(gold.items for gold in usable.values()),
            is_answer=is_answer,
        )
        request.text, request.untabled = found.text, found.untabled
        if not found.text:
            self._finish(request, "no_answer" if found.text is None else "wrong", found.source)
            return
        outcomes: dict[str, Outcome] = {}
        pending: list[str] = []
        answer: Answer | None = None
        for raw, gold in usable.items():
            outcome = self._cache.get((found.text, raw, request.task))
            if outcome is None:
                answer = answer or read(found.text)
                outcome = self._compare(answer, gold, (found.text, raw, request.task))
            if outcome is None:
                pending.append(raw)
                continue
            outcomes[raw] = outcome
            if outcome[0] == "correct":
                self._finish(request, "correct", outcome[1], gold=raw)
                return
        if found.source == "words":  # a few words that are not the gold are no answer
            request.text = None
            self._finish(request, "no_answer", "none")
        elif pending:
            self._ask_workers(request, found.text, pending, usable, outcomes)
        else:
            self._finish(request, *outcomes[request.gold])

    def _begin_verifying(self, response: str, golds: list[str], request: _Request) -> None:
        """Have the verifier compare with each accepted answer: with what its box states, if it has
        one."""
        read = {gold: self._gold(gold, request.task)[1].extracted or gold for gold in golds}
        usable = {gold: text for gold, text in read.items() if text.strip()}
        if not usable:
            self._finish(request, "bad_gold", "gold")
            return
        request.gold, request.text = next(iter(usable)), response
        if not VERIFIERS.traits(str(self.settings.verifier)).whole_response:
            found = extract(response, self.settings.fallback, task=request.task)
            request.text, request.untabled = found.text, found.untabled
        if not request.text:
            self._finish(request, "no_answer", "none")
            return
        known = {gold: self._cache.get((request.text, gold, request.task)) for gold in usable}
        outcomes = {gold: one for gold, one in known.items() if one is not None}
        right = next((gold for gold, one in outcomes.items() if one[0] == "correct"), None)
        if right is not None or len(outcomes) == len(usable):
            self._finish(request, *outcomes[right or request.gold], gold=right)
            return
        pending = [gold for gold in usable if gold not in outcomes]
        self._ask_workers(request, request.text, pending, usable, outcomes)

    def check_verifier(self) -> None:
        """Check that a worker process has the verifier.

        Raises:
            UserError: It does not; the message says why.
        """
        if self.settings.verifier is None:
            return
        reply = self._workers().submit({"has_verifier": True}).result().reply
        if "error" in reply:
            raise UserError(f"grading workers: {reply['error']}")

    def _compare(self, answer: Answer, gold: Answer, key: _Key) -> Outcome | None:
        """The verdict of the fast layers; None if only a worker can tell."""
        comparer = self._own_comparer()
        verdict = comparer.same(answer, gold, key[2])
        if verdict is None:
            return None
        outcome: Outcome = ("correct" if verdict else "wrong", comparer.last_layer)
        self._remember(key, outcome)
        self._audit(key[0], gold, key[2], outcome)
        return outcome

    def _ask_workers(
        self,
        request: _Request,
        text: str,
        pending: list[str],
        golds: Mapping[str, Answer | str],
        outcomes: dict[str, Outcome],
    ) -> None:
        waiting = len(pending)
        lock = threading.Lock()
        seconds = time.perf_counter() - request.started

        def on_arrival(raw: str, done: Future[Result]) -> None:
            nonlocal waiting, seconds
            result = done.result()
            with lock:
                outcomes[raw] = _outcome(result, self._layer)
                seconds += result.seconds
                waiting -= 1
                if waiting:
                    return
            order: list[Status] = ["correct", "timeout", "error", "wrong"]
            name = min(outcomes, key=lambda name: order.index(outcomes[name][0]))
            status, method = outcomes[name]
            gold = name if status == "correct" else None
            self._finish(request, status, method, gold=gold, seconds=seconds)

        for raw in pending:
            job = self._shared_job((text, raw, request.task), golds[raw])
            job.add_done_callback(lambda done, raw=raw: on_arrival(raw, done))  # type: ignore[misc]

    def _shared_job(self, key: _Key, gold: Answer | str) -> Future[Result]:
        """One job per pair, however many samples wait for it."""
        with self._lock:
            running = self._in_flight.get(key)
        if running is not None:
            return running
        text = gold if isinstance(gold, str) else gold.text
        job = self._workers().submit({"answer": key[0], "gold": text, "task": key[2]})
        with self._lock:
            self._in_flight[key] = job

        def on_done(finished: Future[Result]) -> None:
            outcome = _outcome(finished.result(), self._layer)
            if outcome[0] != "error":
                self._remember(key, outcome)
            with self._lock:
                self._in_flight.pop(key, None)

        job.add_done_callback(on_done)
        return job

    def _finish(
        self,
        request: _Request,
        status: Status,
        method: str,
        *,
        gold: str | None = None,
        seconds: float | None = None,
    ) -> None:
        with self._lock:
            self._counts[status] += 1
        request.future.set_result(
            Grade(
                correct=status == "correct",
                status=status,
                answer=request.text,
                gold=request.gold if gold is None else gold,
                method=method,
                seconds=time.perf_counter() - request.started if seconds is None else seconds,
                untabled=request.untabled,
            )
        )

    # -- state

    def _own_comparer(self) -> Comparer:
        comparer = getattr(self._comparer, "value", None)
        if comparer is None:
            comparer = self._comparer.value = Comparer(self.settings)
        return comparer

    def _gold(self, gold: str, task: str) -> tuple[Answer, GoldReport]:
        if not isinstance(gold, str):
            return inspect(gold, task)  # a bad gold, and perhaps no key
        key = (gold, task)
        known = self._golds.get(key)
        if known is None:
            known = inspect(gold, task)
            if self.settings.cache_size and len(gold) <= _MAX_KEY_CHARS:
                _store(self._golds, key, known, self.settings.cache_size)
        return known

    def _remember(self, key: _Key, outcome: Outcome) -> None:
        if self.settings.cache_size and len(key[0]) <= _MAX_KEY_CHARS:
            _store(self._cache, key, outcome, self.settings.cache_size)

    def _workers(self) -> Workers:
        with self._lock:
            if self._pool is None or self._pool_pid != os.getpid():
                if self._closed:
                    raise RuntimeError("this MathGrader is closed")
                self._pool, self._pool_pid = WorkerPool(self.settings), os.getpid()
            return self._pool

    def _audit(self, text: str, gold: Answer, task: str, outcome: Outcome) -> None:
        """Have a sampled verdict checked by SymPy in the background."""
        file = self._disagreements
        if file is None or self._random.random() >= self.settings.audit_fraction:
            return
        fast, method = outcome[0] == "correct", outcome[1]

        def on_checked(done: Future[Result]) -> None:
            verdict = done.result().reply.get("verdict")
            if verdict is not None and bool(verdict) != fast:
                file.add(text, gold.text, fast, bool(verdict), method)

        job = {"answer": text, "gold": gold.text, "task": task, "audit": True}
        self._workers().submit(job).add_done_callback(on_checked)


def _store(cache: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Insert, dropping the oldest entry of a full cache."""
    if len(cache) >= size:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):
            del cache[next(iter(cache))]
    cache[key] = value


def _outcome(result: Result, layer: str) -> Outcome:
    reply = result.reply
    if reply.get("timeout"):
        return "timeout", layer
    if "error" in reply:
        return "error", f"{layer}: {reply['error']}"
    verdict = reply.get("verdict")
    if verdict is None:
        return "wrong", "undecided"
    return ("correct" if verdict else "wrong"), str(reply.get("method", "sympy"))


_default: MathGrader | None = None
_default_lock = threading.Lock()


def _forget_default() -> None:
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_default)


@atexit.register
def _close_default() -> None:
    if _default is not None:
        _default.close()


def default_grader() -> MathGrader:
    """The grader of `grade()`, started on first use and closed at exit."""
    global _default
    with _default_lock:
        if _default is None:
            _default = MathGrader()
            _default.start()
        return _default


def grade(response: str, gold: Gold, *, task: str = "math") -> Grade:
    """Grade one response with the default settings and a pool of this module.

    Args:
        response: the whole completion, or just an answer.
        gold: the accepted answer, or several of which any counts.
        task: `math`, `multiple_choice` (an option letter or the option's text) or `text`.

    Raises:
        ValueError: `task` is none of these.
    """
    return default_grader().grade_one(response, gold, task=task)


def check_gold(gold: str, task: str = "math") -> GoldReport:
    """Read and classify an accepted answer when data is loaded, and say if it cannot be used."""
    return inspect(gold, task)[1]
