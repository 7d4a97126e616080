"""``http(s)://...``: a reward server with OpenRLHF's request and reply.

    request   {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    reply     {"rewards": [...], "scores": [...], "extra_logs": {...}}

Completions that finish one by one are gathered into batches, and many batches are in flight
without blocking the caller's threads. Several addresses share the load, and a batch whose server
fails is sent to the next one. If no server scores a batch in time, its completions get ``None`` and
are counted; they are not scored in another way.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlmath.rewards.base import Reward, RewardError, RewardSettingError, Value, Values
from rlmath.rewards.batcher import Batcher
from rlmath.rewards.circuit_breaker import CircuitBreaker
from rlmath.rewards.http_json import CallFailed, Endpoint, post_json, unreachable
from rlmath.rewards.openrlhf import ExtraLogs, openrlhf_inputs, read_reply
from rlmath.rewards.stats import Counts
from rlmath.rewards.uses import PerUse, Use, current_use, use_for
from rlmath.utils.futures import gather

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Query:
    """A pending request for one completion."""

    query: str
    prompt: str
    label: Any
    value: Future[Value] = field(default_factory=Future)
    use: Use = field(default_factory=current_use)


class _Figures:
    """Metrics of one use since the last drain."""

    def __init__(self) -> None:
        self.logs, self.counts, self.last_error = ExtraLogs(), Counts(), ""


class RemoteReward(Reward):
    """Rewards from one or more servers.

    Args:
        urls: One address, several separated by commas, or a list of them.
        timeout_s: Limit of one call, in seconds.
        total_timeout_s: Limit of all calls for a batch, retries and pauses included.
        retries: Additional attempts after the first.
        backoff_s: Pause before the first retry, with random jitter; it doubles each time, up to
            ``max_backoff_s``.
        batch_size: Maximum number of completions in a call.
        batch_window_s: Maximum time a finished completion waits for others to share a call.
        max_concurrent_calls: Maximum number of calls in flight; ``None``: 32 per address.
        breaker_failures: Consecutive failures that open a server's circuit breaker.
        breaker_cooldown_s: Seconds that it stays open. While all are open, completions are unscored
            immediately instead of after ``total_timeout_s``.
        needs_group: The servers compare a problem's completions, so one call has all of them.
    """

    __name__ = "remote"
    is_asynchronous = True

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        total_timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        max_backoff_s: float = 8.0,
        batch_size: int = 64,
        batch_window_s: float = 0.1,
        max_concurrent_calls: int | None = None,
        breaker_failures: int = 8,
        breaker_cooldown_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        needs_group: bool = False,
    ) -> None:
        addresses = urls.split(",") if isinstance(urls, str) else list(urls)
        try:
            self.endpoints = [Endpoint.parse(u) for u in addresses]
        except ValueError as error:
            raise RewardSettingError(f"remote: {error}") from error
        if not self.endpoints:
            raise RewardSettingError("remote: urls is empty; give at least one address")
        if timeout_s <= 0 or total_timeout_s <= 0 or retries < 0 or backoff_s < 0:
            raise RewardSettingError(
                f"remote: timeout_s={timeout_s} and total_timeout_s={total_timeout_s} must be "
                f"above 0, retries={retries} and backoff_s={backoff_s} not below"
            )
        for name, number in (
            ("batch_size", batch_size),
            ("max_concurrent_calls", max_concurrent_calls),
            ("breaker_failures", breaker_failures),
        ):
            if number is not None and number < 1:
                raise RewardSettingError(f"remote: {name}={number}; at least 1")
        if batch_window_s < 0 or breaker_cooldown_s < 0:
            raise RewardSettingError(
                f"remote: batch_window_s={batch_window_s} and "
                f"breaker_cooldown_s={breaker_cooldown_s} must not be below 0"
            )
        self.timeout_s = timeout_s
        self.total_timeout_s = total_timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.max_backoff_s = max_backoff_s
        self.batch_size = batch_size
        self.headers = dict(headers or {})
        self.needs_group = needs_group  # type: ignore[misc]
        self._breakers = [
            CircuitBreaker(breaker_failures, breaker_cooldown_s) for _ in self.endpoints
        ]
        self._pool = ThreadPoolExecutor(
            max_concurrent_calls or 32 * len(self.endpoints), thread_name_prefix="remote-reward"
        )
        self._batcher: Batcher[_Query] = Batcher(batch_size, batch_window_s, self._send)
        self._figures = PerUse(_Figures)
        self._turn = itertools.count()
        self._closing = threading.Event()

    def submit(self, completions: Sequence[Any], **columns: Any) -> Future[Values]:
        """The values, later. Calls share requests unless ``needs_group``."""
        queries = _queries(completions, columns)
        if self.needs_group:
            if queries:
                self._send(queries)
        elif not self._batcher.add(queries):
            _cancel(queries)
        return gather([query.value for query in queries])

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        """The values of the completions, split evenly over all servers."""
        queries = _queries(completions, columns)
        if not queries:
            return []
        parts = 1
        if not self.needs_group:
            parts = max(min(len(self.endpoints), len(queries)), -(-len(queries) // self.batch_size))
        bounds = [len(queries) * i // parts for i in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            self._send(queries[start:stop])
        return [query.value.result() for query in queries]

    def probe(self) -> None:
        """Connect to every server once. Raises RewardSettingError: none can be reached."""
        failures = [f"{one.url}: {why}" for one in self.endpoints if (why := unreachable(one))]
        if len(failures) == len(self.endpoints):
            raise RewardSettingError(
                f"remote: no reward server can be reached ({'; '.join(failures)}). Start it, or "
                "correct its address in reward.items"
            )
        for failure in failures:
            log.warning("remote reward: a server cannot be reached: %s", failure)

    def _send(self, queries: list[_Query]) -> None:
        """Start scoring, one call per use; returns immediately."""
        for use in Use:
            if of_use := [query for query in queries if query.use is use]:
                self._send_call(of_use)

    def _send_call(self, queries: list[_Query]) -> None:
        turn = next(self._turn)

        def score() -> None:
            values: Values
            try:
                with use_for(queries[0].use):
                    values = self._score(queries, turn)
            except BaseException as error:
                for query in queries:
                    query.value.set_exception(error)
                return
            for query, value in zip(queries, values, strict=True):
                query.value.set_result(value)

        try:
            call = self._pool.submit(score)
        except RuntimeError:  # Closed.
            _cancel(queries)
            return
        call.add_done_callback(lambda done: _cancel(queries) if done.cancelled() else None)

    def _score(self, queries: Sequence[_Query], turn: int) -> Values:
        """The rewards of one call; all ``None`` if every attempt failed."""
        body = {
            "query": [query.query for query in queries],
            "prompts": [query.prompt for query in queries],
            "labels": [query.label for query in queries],
        }
        deadline = time.monotonic() + self.total_timeout_s
        pause_s = self.backoff_s
        for attempt in range(self.retries + 1):
            try:
                reply = self._call(body, turn + attempt, deadline)
                return read_reply(self.__name__, reply, len(queries), self._figures.current.logs)
            except (CallFailed, RewardError) as error:
                last = attempt == self.retries or not getattr(error, "retry", True)
                if last or self._closing.is_set():
                    figures = self._figures.current
                    figures.last_error = str(error)
                    figures.counts.add("failed_calls")
                    figures.counts.add("unscored", len(queries))
                    break
                self._figures.current.counts.add("retries")
                wait_s = max(pause_s, getattr(error, "retry_after_s", 0.0))
                wait_s = min(wait_s, self.max_backoff_s) * random.uniform(0.5, 1.0)
                self._closing.wait(min(wait_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, self.max_backoff_s)
        return [None] * len(queries)

    def _call(self, body: Mapping[str, Any], turn: int, deadline: float) -> Any:
        """One attempt, at the first server from ``turn`` on whose breaker allows it."""
        count = len(self.endpoints)
        for index in (i % count for i in range(turn, turn + count)):
            if self._breakers[index].allows():
                break
        else:
            raise CallFailed(
                f"all {count} servers fail and are left alone for a while (breaker_failures, "
                "breaker_cooldown_s)",
                retry=False,
            )
        endpoint, breaker = self.endpoints[index], self._breakers[index]
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise CallFailed(
                f"{endpoint.url}: total_timeout_s={self.total_timeout_s:g} is used up", retry=False
            )
        self._figures.current.counts.add("calls")
        try:
            reply = post_json(
                endpoint, body, timeout_s=min(self.timeout_s, remaining_s), headers=self.headers
            )
        except CallFailed as error:
            # A server that rejects a request is available.
            (breaker.record_failure if error.retry else breaker.record_success)()
            raise
        breaker.record_success()
        return reply

    def drain_metrics(self) -> dict[str, float]:
        """``calls``, ``retries``, ``failed_calls``, ``servers_down``, and the means of the servers'
        own metrics. Warns once about completions that were unscored since the last call."""
        figures = self._figures.current
        counts = figures.counts.drain()
        if counts["unscored"]:
            log.warning(
                "remote reward: %d completions are unscored (%d failed calls); the last error: %s",
                counts["unscored"],
                counts["failed_calls"],
                figures.last_error,
            )
        own = {name: float(counts[name]) for name in ("calls", "retries", "failed_calls")}
        down = sum(breaker.is_open for breaker in self._breakers)
        return {**figures.logs.drain(), **own, "servers_down": float(down)}

    def close(self) -> None:
        self._closing.set()
        _cancel(self._batcher.close())
        self._pool.shutdown(wait=True, cancel_futures=True)


def _queries(completions: Sequence[Any], columns: Mapping[str, Any]) -> list[_Query]:
    return [_Query(*one) for one in zip(*openrlhf_inputs(completions, columns), strict=True)]


def _cancel(queries: Sequence[_Query]) -> None:
    for query in queries:
        query.value.cancel()
