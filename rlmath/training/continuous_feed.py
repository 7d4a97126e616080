"""Sampling while the actor trains, cut when its weights change."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlmath.monitor import Monitor
from rlmath.rollout.continuous import ContinuousSampler
from rlmath.rollout.open_round import OpenRound
from rlmath.rollout.requests import Request
from rlmath.rollout.sampler import Sampled
from rlmath.training.feed import CLOSE_WAIT_S, Feed, SamplingCancelled
from rlmath.training.session import Session
from rlmath.utils.daemon_threads import DaemonThreads

# How often the step looks at grades that have come, while it waits for its groups.
LOOK_EVERY_S = 0.1


class ContinuousFeed(Feed):
    """From the beginning of a step to its weight sync, a thread has the engines sample with the
    weights of before the step's update; the step takes its groups as soon as they are there.

    What a step trains on depends on when the engines are cut: a run does not repeat itself. What it
    has trained on is kept, and each update can be done again (``rlmath replay``).
    """

    def __init__(self, session: Session, sampler: ContinuousSampler, monitor: Monitor) -> None:
        super().__init__(session, sampler, monitor)
        self._open_sampler = sampler
        self._thread = DaemonThreads(1, "sample")
        # Guards the sampler, the round and what follows here, between the thread and the loop.
        self._changed = threading.Condition()
        self._round: OpenRound | None = None
        self._stopped = self._cancelled = False
        self._running: Future[None] | None = None
        self._ended_s: float | None = None
        # What the engines did in the round before: of this one it is known when it ends.
        self._last_round: tuple[Mapping[str, Any] | None, dict[str, float]] = (None, {})
        self._waited_s = {"actor": 0.0, "engines": 0.0}

    def take(self, step: int) -> Sampled:
        """Let the engines sample, and wait for the step's groups. The engines continue."""
        self._set_step(step)
        if self._ended_s is not None:
            self._waited_s["engines"] += time.monotonic() - self._ended_s
        sampling = self._session.sampling
        began_s = time.monotonic()
        with self._monitor.phase("generate"):
            self._begin(step)
            with self._changed:
                self._wait_until_ready()
                sampled = self._open_sampler.take(step)
        self._waited_s["actor"] += time.monotonic() - began_s
        engines, sampled_before = self._last_round
        more = sampling.pool.metrics() | sampled_before | sampling.rewards.metrics()
        return replace(sampled, engines=engines, metrics=sampled.metrics | more)

    @contextlib.contextmanager
    def sampling_ahead(self, step: int) -> Iterator[None]:
        """See :meth:`Feed.sampling_ahead`. The last step has no next one.

        Raises:
            EngineError: An engine failed, and no more restarts are left.
            RewardError: A reward failed.
        """
        is_last = step >= self._session.config.runner.steps
        if is_last:
            self._end(step)
        # What samples now is gone from the actor with its next update.
        self._session.sampling.pool.take_weights_away()
        try:
            yield
        except BaseException:
            self._cancel()
            raise
        if not is_last:
            self._end(step)
        self._ended_s = time.monotonic()

    def close(self) -> None:
        """End the sampling under way, within seconds; what hangs is left behind."""
        self._cancel()
        self._thread.close(CLOSE_WAIT_S)

    def metrics(self) -> dict[str, float]:
        """``schedule/..._waited_s`` since the last call: the actor for samples, and the engines
        between two rounds."""
        found = {f"schedule/{who}_waited_s": waited for who, waited in self._waited_s.items()}
        self._waited_s = dict.fromkeys(self._waited_s, 0.0)
        return found

    def _begin(self, step: int) -> None:
        weights = self._weights(step - 1)
        with self._changed:
            self._stopped = False
            self._round = self._open_sampler.open(step, self._session.sampling.collector)
            first = self._round.begin()
        self._running = self._thread.submit(self._sample, step, self._round, first, weights)

    def _end(self, step: int) -> None:
        """Have the engines cut what is unfinished; returns when all of it is back."""
        running, self._running = self._running, None
        assert running is not None, f"nothing samples in step {step}"
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # Not before the thread is in ``generate``, which would not hear of it.
        while not running.done():
            self._session.sampling.pool.cut()
            with contextlib.suppress(TimeoutError):
                running.result(timeout=1.0)
        running.result()
        with self._changed:
            self._open_sampler.close(step)
        generation = self._session.sampling.pool.generation
        if generation is not None:
            self._last_round = generation.summary(), generation.metrics()

    def _cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _sample(
        self, step: int, work: OpenRound, first: Sequence[Request], weights: str | None
    ) -> None:
        """The thread's part."""
        pool = self._session.sampling.pool
        with self._open_sampler.journal.step(step, weights) as journal:
            for sample in pool.generate(first, self._more, journal, outlasts_engines=True):
                with self._changed:
                    work.take(sample)
            journal.tell(step)

    def _more(self, engines_idle: bool) -> Sequence[Request]:
        with self._changed:
            while not self._stopped:
                if self._cancelled:
                    raise SamplingCancelled
                assert self._round is not None
                requests = self._round.more(engines_idle)
                if self._round.is_ready:
                    self._changed.notify_all()
                if requests or not engines_idle:
                    return requests
                self._changed.wait(LOOK_EVERY_S)
            return []

    def _wait_until_ready(self) -> None:
        assert self._running is not None and self._round is not None
        while not self._round.is_ready:
            if self._running.done():
                self._running.result()
                raise RuntimeError("sampling ended before the step had its groups")
            self._changed.wait(LOOK_EVERY_S)
            self._round.look()
