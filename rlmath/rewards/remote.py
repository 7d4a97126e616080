"""``http(s)://...``: a reward server with OpenRLHF's request and reply.

    request   {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    reply     {"rewards": [...], "scores": [...], "extra_logs": {...}}

Several addresses share the work: the completions are cut into as many parts, sent at once, and a
part whose server fails goes to the next one. A part that no server could score in time is ``None``
for each of its completions, and counted.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlmath.rewards.base import Reward, RewardError, RewardSettingError, Values
from rlmath.rewards.http_json import CallFailed, Endpoint, post_json
from rlmath.rewards.openrlhf import ExtraLogs, openrlhf_inputs, read_reply

log = logging.getLogger(__name__)


class RemoteReward(Reward):
    """Rewards from one or more servers.

    Args:
        urls: One address, several with commas between, or a list of them.
        timeout_s: Limit of one call, in seconds.
        total_timeout_s: Limit of all calls for one part together, retries and pauses included.
        retries: Further attempts after the first.
        backoff_s: Pause before the first retry; it doubles each time, up to ``max_backoff_s``,
            with a random part so that many callers do not come back at once.
        max_backoff_s: Longest pause.
        max_batch_size: Most completions in one call; ``None``: no bound.
        max_concurrent_calls: Calls under way at once; ``None``: 8 for each address.
        headers: Sent with each call, an ``Authorization`` for instance.
        needs_group: The servers compare a problem's completions, so they want them all at once.
    """

    __name__ = "remote"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        total_timeout_s: float = 120.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        max_backoff_s: float = 8.0,
        max_batch_size: int | None = None,
        max_concurrent_calls: int | None = None,
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
        if max_batch_size is not None and max_batch_size < 1:
            raise RewardSettingError(f"remote: max_batch_size={max_batch_size}; at least 1")
        self.timeout_s = timeout_s
        self.total_timeout_s = total_timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.max_backoff_s = max_backoff_s
        self.max_batch_size = max_batch_size
        self.headers = dict(headers or {})
        self.needs_group = needs_group  # type: ignore[misc]
        self._pool = ThreadPoolExecutor(
            max_concurrent_calls or 8 * len(self.endpoints), thread_name_prefix="remote-reward"
        )
        self._logs = ExtraLogs()
        self._lock = threading.Lock()
        self._counts = {"calls": 0, "retries": 0, "failed_calls": 0}
        self._next = 0
        self._closing = threading.Event()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        queries, prompts, labels = openrlhf_inputs(completions, columns)
        if not queries:
            return []
        parts = []
        for start, stop in self._cuts(len(queries)):
            body = {
                "query": queries[start:stop],
                "prompts": prompts[start:stop],
                "labels": labels[start:stop],
            }
            parts.append(self._pool.submit(self._score, body, stop - start, self._turn()))
        return [value for part in parts for value in part.result()]

    def _cuts(self, count: int) -> list[tuple[int, int]]:
        """Even parts: one for each server, or more where ``max_batch_size`` asks for it."""
        pieces = 1 if self.needs_group else min(len(self.endpoints), count)
        if self.max_batch_size is not None and not self.needs_group:
            pieces = max(pieces, -(-count // self.max_batch_size))
        bounds = [count * i // pieces for i in range(pieces + 1)]
        return list(itertools.pairwise(bounds))

    def _turn(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def _score(self, body: Mapping[str, Any], count: int, turn: int) -> Values:
        """One part's rewards; ``None`` for all of it when every attempt failed."""
        deadline = time.monotonic() + self.total_timeout_s
        pause_s = self.backoff_s
        for attempt in range(self.retries + 1):
            endpoint = self.endpoints[(turn + attempt) % len(self.endpoints)]
            remaining_s = deadline - time.monotonic()
            try:
                if remaining_s <= 0:
                    raise CallFailed(
                        f"{endpoint.url}: total_timeout_s={self.total_timeout_s:g} is used up",
                        retry=False,
                    )
                self._count("calls")
                reply = post_json(
                    endpoint,
                    body,
                    timeout_s=min(self.timeout_s, remaining_s),
                    headers=self.headers,
                )
                return read_reply(self.__name__, reply, count, self._logs)
            except (CallFailed, RewardError) as error:
                last = attempt == self.retries or not getattr(error, "retry", True)
                if last or self._closing.is_set():
                    self._count("failed_calls")
                    log.warning(
                        "remote reward: %d completions got None after %d attempt(s): %s",
                        count,
                        attempt + 1,
                        error,
                    )
                    break
                self._count("retries")
                wait_s = max(pause_s, getattr(error, "retry_after_s", 0.0))
                wait_s = min(wait_s, self.max_backoff_s) * random.uniform(0.5, 1.0)
                self._closing.wait(min(wait_s, max(0.0, deadline - time.monotonic())))
                pause_s = min(2 * pause_s, self.max_backoff_s)
        return [None] * count

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def drain_metrics(self) -> dict[str, float]:
        """``calls``, ``retries``, ``failed_calls``, and the means of the servers' own figures."""
        with self._lock:
            counts = {name: float(n) for name, n in self._counts.items()}
            self._counts = dict.fromkeys(self._counts, 0)
        return {**self._logs.drain(), **counts}

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
