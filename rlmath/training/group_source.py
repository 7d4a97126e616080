"""Where a step's groups come from. The rest of the loop does not know which schedule runs."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmath.config.rollout import RolloutSchedule, max_lag
from rlmath.engines.requests import Request
from rlmath.monitor import Monitor
from rlmath.monitor.digests import digest
from rlmath.rollout.continuous import ContinuousSampler
from rlmath.rollout.open_round import OpenRound
from rlmath.rollout.round import Round
from rlmath.rollout.sampler import Sampled, Sampler
from rlmath.training.opening import Running
from rlmath.utils.daemon_threads import DaemonThreads

# Longest wait at a run's end for what samples in the background. A reward, an engine or a rank may
# hang; the engines and ranks that it waits for are ended only after it.
CLOSE_WAIT_S = 10.0
# How often the step looks at grades that have come, while it waits for its groups.
LOOK_EVERY_S = 0.1


class GroupSource:
    """Gives each step its groups, by :meth:`take`, and has the engines idle when the weights
    change, by :meth:`weights_changed`. What happens between the two is the schedule's affair:

    - ``synchronous`` and ``carry_over`` sample in :meth:`take`.
    - ``pipelined`` samples the next step's groups meanwhile, with the weights of before this step's
      update. What is sampled depends on no clock: the engines are done before the weights change.
    - ``continuous`` samples from :meth:`take` on, which returns as soon as the step's groups are
      there, and what is unfinished is cut when the weights change. What a step trains on depends on
      when: a run does not repeat itself, but each update can be done again (``rlmath replay``).

    Args:
        run: Its engines sample.
        sampler: Decides what; from :func:`rlmath.rollout.continuous.sampler_of`.
        monitor: Times it.
    """

    def __init__(self, run: Running, sampler: Sampler, monitor: Monitor) -> None:
        self._run, self._sampler, self._monitor = run, sampler, monitor
        self._open_sampler = sampler if isinstance(sampler, ContinuousSampler) else None
        rollout = run.config.rollout
        is_pipelined = rollout.schedule is RolloutSchedule.pipelined
        self._samples_ahead = is_pipelined and max_lag(rollout) > 0
        self._thread = DaemonThreads(1, "sample-ahead")
        # Guards the sampler, the round and what follows here, between the thread and the loop.
        self._changed = threading.Condition()
        self._round: OpenRound | None = None
        self._stopped = self._cancelled = False
        self._running: Future[None] | None = None
        self._idle_since_s: float | None = None
        # What the engines did in the open round before: of this one it is known when it ends.
        self._last_round: tuple[Mapping[str, Any] | None, dict[str, float]] = (None, {})
        self._waited_s = {"actor": 0.0, "engines": 0.0}

    def take(self, step: int) -> Sampled:
        """The groups of a step, with the metrics of sampling, engines and rewards. Engines that
        share GPUs sleep when this returns.

        Raises:
            EngineError: An engine failed, and no more restarts are left.
            RewardError: A reward failed.
        """
        self._set_step(step)
        sampled = self._take(step) if self._open_sampler is None else self._take_open(step)
        has_next = step < self._run.config.runner.steps
        pool = self._run.sampling.pool
        if self._samples_ahead and has_next:
            # What samples now is gone from the actor with its next update.
            pool.take_weights_away()
            self._engines_begin()
            self._set_step(step + 1)
            self._running = self._thread.submit(
                self._sample_ahead, step + 1, self._weights(step - 1)
            )
        elif self._open_sampler is not None:
            if not has_next:
                self._cut(step)
            pool.take_weights_away()
        return sampled

    def weights_changed(self, step: int) -> None:
        """The ranks have updated the weights: engines finish what they sample, or are cut, so that
        they can get them. Raises what :meth:`take` does."""
        if self._running is None:
            return
        if self._open_sampler is not None:
            self._cut(step)
            self._idle_since_s = time.monotonic()
            return
        running, self._running = self._running, None
        began_s = time.monotonic()
        with self._monitor.phase("generate"):
            running.result()
        self._waited_s["actor"] += time.monotonic() - began_s
        self._set_step(step)

    def forget(self, step: int) -> None:
        """A resumed run must not find samples of this step again, nor of a later one; sampling
        ends."""
        self._cancel()
        for one in (step, step + 1)[: 1 + self._samples_ahead]:
            self._sampler.journal.forget(one)

    def close(self) -> None:
        """End the sampling that is running, within seconds; what hangs is left behind."""
        self._cancel()
        self._thread.close(CLOSE_WAIT_S)

    def metrics(self) -> dict[str, float]:
        """``schedule/..._waited_s`` since the last call, the actor for samples and the engines for
        weights; nothing where they take turns."""
        if not self._samples_ahead and self._open_sampler is None:
            return {}
        found = {f"schedule/{who}_waited_s": waited for who, waited in self._waited_s.items()}
        self._waited_s = dict.fromkeys(self._waited_s, 0.0)
        return found

    # -- whole rounds ---------------------------------------------------------------------------

    def _take(self, step: int) -> Sampled:
        if not self._sampler.is_sampled:
            with self._monitor.phase("generate"):
                # Grading starts with the first finished sample.
                self._generate(step, lambda: self._monitor.phase("grade"), self._weights(step - 1))
        sampled = self._sampler.take(step)
        self._run.sampling.pool.sleep()
        if sampled.groups:
            # The weights come back while the driver makes a batch of them.
            self._run.actor.begin_load()
        return sampled

    def _sample_ahead(self, step: int, weights: str | None) -> None:
        """The thread's part."""
        self._generate(step, contextlib.nullcontext, weights, ahead=True)
        self._idle_since_s = time.monotonic()

    def _generate(
        self,
        step: int,
        while_grading: Callable[[], Any],
        weights: str | None,
        ahead: bool = False,
    ) -> Round:
        sampling = self._run.sampling
        pool: Any = _Cancellable(sampling.pool, self) if ahead else sampling.pool
        done = self._sampler.generate(
            step,
            pool,
            sampling.collector,
            while_grading=while_grading,
            weights=weights,
            ahead=ahead,
        )
        generation = sampling.pool.generation
        done.engines = None if generation is None else generation.summary()
        done.metrics |= sampling.pool.metrics() | sampling.rewards.metrics()
        return done

    # -- open rounds ----------------------------------------------------------------------------

    def _take_open(self, step: int) -> Sampled:
        """Let the engines sample, and wait for the step's groups. The engines continue."""
        assert self._open_sampler is not None
        self._engines_begin()
        sampling = self._run.sampling
        began_s = time.monotonic()
        with self._monitor.phase("generate"):
            self._begin(self._open_sampler, step)
            with self._changed:
                self._wait_until_ready()
                sampled = self._open_sampler.take(step)
        self._waited_s["actor"] += time.monotonic() - began_s
        engines, sampled_before = self._last_round
        more = sampling.pool.metrics() | sampled_before | sampling.rewards.metrics()
        return replace(sampled, engines=engines, metrics=sampled.metrics | more)

    def _begin(self, sampler: ContinuousSampler, step: int) -> None:
        weights = self._weights(step - 1)
        with self._changed:
            self._stopped = False
            self._round = sampler.open(step, self._run.sampling.collector)
            first = self._round.begin()
        self._running = self._thread.submit(self._sample_openly, step, self._round, first, weights)

    def _cut(self, step: int) -> None:
        """Have the engines cut what is unfinished; returns when all of it is back."""
        running, self._running = self._running, None
        assert running is not None and self._open_sampler is not None
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # Not before the thread is in ``generate``, which would not hear of it.
        while not running.done():
            self._run.sampling.pool.cut()
            with contextlib.suppress(TimeoutError):
                running.result(timeout=1.0)
        running.result()
        with self._changed:
            self._open_sampler.close(step)
        generation = self._run.sampling.pool.generation
        if generation is not None:
            self._last_round = generation.summary(), generation.metrics()

    def _sample_openly(
        self, step: int, work: OpenRound, first: Sequence[Request], weights: str | None
    ) -> None:
        """The thread's part."""
        pool = self._run.sampling.pool
        with self._sampler.journal.step(step, weights) as journal:
            for sample in pool.generate(first, self._more, journal, outlasts_engines=True):
                with self._changed:
                    work.take(sample)
            journal.tell(step)

    def _more(self, engines_idle: bool) -> Sequence[Request]:
        with self._changed:
            while not self._stopped:
                self.check_cancelled()
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

    # -------------------------------------------------------------------------------------------

    def check_cancelled(self) -> None:
        """Called by what samples in the thread.

        Raises:
            SamplingCancelled: The step that it samples beside has failed.
        """
        if self._cancelled:
            raise SamplingCancelled

    def _cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        if self._samples_ahead:
            self._run.sampling.collector.cancel()

    def _engines_begin(self) -> None:
        if self._idle_since_s is not None:
            self._waited_s["engines"] += time.monotonic() - self._idle_since_s

    def _set_step(self, step: int) -> None:
        """Rewards may change over a run: what is graded from now on is of this step."""
        rewards = self._run.sampling.rewards
        rewards.set_step(step, self._run.config.runner.steps)

    def _weights(self, version: int) -> str | None:
        return weights_digest(self._run, self._monitor, version)


class SamplingCancelled(Exception):
    """The step that the sampling went on beside has failed."""


class _Cancellable:
    """A pool whose sampling ends when the source is closed, at the next answer of an engine."""

    def __init__(self, pool: Any, source: GroupSource) -> None:
        self._pool, self._source = pool, source

    def generate(self, requests: Any, more: Callable[[bool], Any], journal: Any) -> Iterator[Any]:
        def more_unless_cancelled(engines_idle: bool) -> Any:
            self._source.check_cancelled()
            return more(engines_idle)

        yield from self._pool.generate(requests, more_unless_cancelled, journal)


def weights_digest(run: Running, monitor: Monitor, version: int) -> str | None:
    """What tells the weights that sample, and how engines compute with them.

    Args:
        version: Of the weights: updates that were done.

    Returns:
        ``None``: it is not known.
    """
    config = run.config
    if version > 0:
        weights = monitor.digest_log.weights_after(version)
    else:
        files = sorted(path for path in Path(config.model.path).glob("*") if path.is_file())
        weights = digest(*(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files))
    if weights is None:
        return None
    vllm = importlib.util.find_spec("vllm")
    installed = 0 if vllm is None or not vllm.origin else Path(vllm.origin).stat().st_mtime_ns
    layout = run.layout
    quantized = (config.rollout.quantization, config.rollout.kv_cache_dtype)
    engine = (config.model, config.precision, layout.engine_tensor_parallel, installed, quantized)
    return digest(weights, layout.device.value, repr(engine), repr(config.actor.lora))
