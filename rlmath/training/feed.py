"""Where a step's groups come from: sampled in the step, or in the one before it.

The rest of the loop does not know which schedule runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlmath.monitor import Monitor
from rlmath.monitor.digests import digest
from rlmath.rollout.round import Round
from rlmath.rollout.sampler import Sampled, Sampler
from rlmath.training.session import Session
from rlmath.utils.daemon_threads import DaemonThreads

# Longest wait at a run's end for what samples in the background. A reward, an engine or a rank may
# hang; the engines and ranks that it waits for are ended only after it.
CLOSE_WAIT_S = 10.0


class Feed:
    """Gives each step its groups; ``synchronous`` and ``carry_over`` sample them in the step.

    Args:
        session: Its engines sample.
        sampler: Decides what.
        monitor: Times it.
    """

    def __init__(self, session: Session, sampler: Sampler, monitor: Monitor) -> None:
        self._session, self._sampler, self._monitor = session, sampler, monitor

    def take(self, step: int) -> Sampled:
        """Sample and grade the groups of a step; engines that share GPUs sleep when this returns.

        Returns:
            The groups, with the metrics of sampling, engines and rewards.
        """
        self._set_step(step)
        if not self._sampler.is_sampled:
            with self._monitor.phase("generate"):
                # Grading starts with the first finished sample.
                self._generate(step, lambda: self._monitor.phase("grade"), self._weights(step - 1))
        sampled = self._sampler.take(step)
        self._session.sampling.pool.sleep()
        if sampled.groups:
            # The weights come back while the driver makes a batch of them.
            self._session.actor.begin_load()
        return sampled

    @contextlib.contextmanager
    def sampling_ahead(self, step: int) -> Iterator[None]:
        """Engines that would have nothing to do during this block sample for a later step; at its
        end they are done.

        Args:
            step: The present one.
        """
        yield

    def forget(self, step: int) -> None:
        """A resumed run must not find samples of this step again, nor of a later one."""
        self._sampler.journal.forget(step)

    def close(self) -> None:
        """End what runs in the background."""

    def metrics(self) -> dict[str, float]:
        """Who waited for whom, since the last call; nothing where they take turns."""
        return {}

    def _generate(
        self,
        step: int,
        while_grading: Callable[[], Any],
        weights: str | None,
        pool: Any = None,
        ahead: bool = False,
    ) -> Round:
        sampling = self._session.sampling
        done = self._sampler.generate(
            step,
            sampling.pool if pool is None else pool,
            sampling.collector,
            while_grading=while_grading,
            weights=weights,
            ahead=ahead,
        )
        generation = sampling.pool.generation
        done.engines = None if generation is None else generation.summary()
        done.metrics |= sampling.pool.metrics() | sampling.rewards.metrics()
        return done

    def _set_step(self, step: int) -> None:
        """Rewards may change over a run: what is graded from now on is of this step."""
        rewards = self._session.sampling.rewards
        rewards.set_step(step, self._session.config.runner.steps)

    def _weights(self, version: int) -> str | None:
        return weights_digest(self._session, self._monitor, version)


class PipelinedFeed(Feed):
    """Samples the next step's groups, with the weights of before this step's update, while the
    actor trains on this step's.

    Every sample has one version of the weights, one step older than the actor's when it is trained
    on. What is sampled depends on neither clock: the engines are done before the weights change.
    """

    def __init__(self, session: Session, sampler: Sampler, monitor: Monitor) -> None:
        super().__init__(session, sampler, monitor)
        self._thread = DaemonThreads(1, "sample-ahead")
        self._cancelled = threading.Event()
        self._ended_s: float | None = None
        self._waited_s = {"actor": 0.0, "engines": 0.0}

    @contextlib.contextmanager
    def sampling_ahead(self, step: int) -> Iterator[None]:
        """See :meth:`Feed.sampling_ahead`. The last step has no next one.

        Raises:
            EngineError: An engine failed, and no more restarts are left.
            RewardError: A reward failed.
        """
        if step >= self._session.config.runner.steps:
            yield
            return
        pool = self._session.sampling.pool
        # What samples now is gone from the actor with its next update.
        pool.has_weights_at_hand = False
        began_s = time.monotonic()
        if self._ended_s is not None:
            self._waited_s["engines"] += began_s - self._ended_s
        self._set_step(step + 1)
        running = self._thread.submit(self._sample, step + 1, self._weights(step - 1))
        try:
            yield
        except BaseException:
            self._cancel()
            raise
        self._wait_for(running)
        self._set_step(step)

    def forget(self, step: int) -> None:
        """See :meth:`Feed.forget`."""
        super().forget(step)
        super().forget(step + 1)

    def close(self) -> None:
        """End the sampling under way, within seconds; what hangs is left behind."""
        self._cancel()
        self._thread.close(CLOSE_WAIT_S)

    def metrics(self) -> dict[str, float]:
        """``schedule/..._waited_s`` since the last call: the actor for samples, and the engines for
        weights."""
        found = {f"schedule/{who}_waited_s": waited for who, waited in self._waited_s.items()}
        self._waited_s = dict.fromkeys(self._waited_s, 0.0)
        return found

    def _cancel(self) -> None:
        self._cancelled.set()
        self._session.sampling.collector.cancel()

    def _sample(self, step: int, weights: str | None) -> float:
        """Sample for a step; returns when it ended."""
        pool = _Cancellable(self._session.sampling.pool, self._cancelled)
        self._generate(step, contextlib.nullcontext, weights, pool, ahead=True)
        return time.monotonic()

    def _wait_for(self, running: Future[float]) -> None:
        began_s = time.monotonic()
        with self._monitor.phase("generate"):
            self._ended_s = running.result()
        self._waited_s["actor"] += time.monotonic() - began_s


class SamplingCancelled(Exception):
    """The step that the sampling went on beside has failed."""


class _Cancellable:
    """A pool whose sampling ends when it is told to, at the next answer of an engine."""

    def __init__(self, pool: Any, cancelled: threading.Event) -> None:
        self._pool, self._cancelled = pool, cancelled

    def generate(self, requests: Any, more: Callable[[bool], Any], journal: Any) -> Iterator[Any]:
        def more_unless_cancelled(engines_idle: bool) -> Any:
            if self._cancelled.is_set():
                raise SamplingCancelled
            return more(engines_idle)

        yield from self._pool.generate(requests, more_unless_cancelled, journal)


def weights_digest(session: Session, monitor: Monitor, version: int) -> str | None:
    """What tells the weights that sample, and how engines compute with them.

    Args:
        version: Of the weights: updates that were done.

    Returns:
        ``None``: it is not known.
    """
    config = session.config
    if version > 0:
        weights = monitor.digest_log.weights_after(version)
    else:
        files = sorted(path for path in Path(config.model.path).glob("*") if path.is_file())
        weights = digest(*(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files))
    if weights is None:
        return None
    vllm = importlib.util.find_spec("vllm")
    installed = 0 if vllm is None or not vllm.origin else Path(vllm.origin).stat().st_mtime_ns
    layout = session.layout
    quantized = (config.rollout.quantization, config.rollout.kv_cache_dtype)
    engine = (config.model, config.precision, layout.engine_tensor_parallel, installed, quantized)
    return digest(weights, layout.device.value, repr(engine), repr(config.actor.lora))
