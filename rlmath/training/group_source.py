"""Where a step's groups come from. The rest of the loop does not know which schedule runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmath.config.rollout import overlap_of
from rlmath.monitor import Monitor
from rlmath.monitor.digests import digest
from rlmath.rollout.collect import LOOK_EVERY_S
from rlmath.rollout.round import Sampled
from rlmath.rollout.sampler import Sampler
from rlmath.training.opening import Running
from rlmath.utils.daemon_threads import DaemonThreads

# Longest wait at a run's end for sampling in the background, which may hang in a reward, an engine
# or a rank. Engines and ranks are ended only afterwards.
CLOSE_WAIT_S = 10.0


class GroupSource:
    """Gives each step its groups, by :meth:`take`, and has the engines idle when the weights
    change, by :meth:`weights_changed`. Two numbers decide what happens between the two
    (:class:`rlmath.config.rollout.Overlap`):

    - Engines that take turns with the actor sample in :meth:`take`.
    - With whole responses a step ahead, engines sample the next step's groups during this step's
      update, with the weights from before it, and finish before the weights change. The samples do
      not depend on timing.
    - With responses that are cut at the weight sync, engines sample without a pause. :meth:`take`
      returns as soon as the step's groups are complete, and unfinished responses are cut when the
      weights change. The samples of a step depend on timing, so runs are not reproducible, but each
      update is (``rlmath replay``).

    Args:
        run: Ranks and engines.
        sampler: Chooses problems and collects groups.
        monitor: Gets the times.
    """

    def __init__(self, run: Running, sampler: Sampler, monitor: Monitor) -> None:
        self._run, self._sampler, self._monitor = run, sampler, monitor
        self._overlap = overlap_of(run.config.rollout)
        self._thread = DaemonThreads(1, "sample-ahead")
        self._running: Future[None] | None = None
        self._idle_since_s: float | None = None
        self._waited_s = {"actor": 0.0, "engines": 0.0}

    def take(self, step: int) -> Sampled:
        """The groups of a step, with the metrics of sampling, engines and rewards. Engines that
        share GPUs sleep when this returns. Raises EngineError: an engine failed, and no more
        restarts are left; RewardError: a reward failed."""
        self._set_step(step)
        if not self._sampler.is_sampled:
            with self._monitor.phase("generate"):
                self._sample(step)
        sampled = self._sampler.take(step)
        pool, has_next = self._run.sampling.pool, step < self._run.config.runner.steps
        if self._running is not None:
            sampled = replace(sampled, metrics=sampled.metrics | self._figures())
            if not has_next:
                self._end_sampling()
            pool.take_weights_away()
            return sampled
        pool.sleep()
        if sampled.groups:
            # The weights come back while the driver makes a batch of them.
            self._run.actor.begin_load()
        if self._overlap.is_beside and has_next:
            # The actor's next update overwrites the weights that sample now.
            pool.take_weights_away()
            self._begin(step + 1, ahead=True)
        return sampled

    def weights_changed(self, step: int) -> None:
        """Call after an update of the weights, before their sync: engines finish their requests,
        or cut them. Raises the same errors as :meth:`take`."""
        if self._running is None:
            return
        began_s = time.monotonic()
        with self._monitor.phase("generate"):
            self._end_sampling()
        self._waited_s["actor"] += time.monotonic() - began_s
        self._set_step(step)

    def forget(self, step: int) -> None:
        """End sampling, and drop samples of this step and the next from the journal, so that
        a resumed run does not use them."""
        self._cancel()
        for one in (step, step + 1):
            self._sampler.journal.forget(one)

    def close(self) -> None:
        """End sampling within seconds; a thread that hangs is abandoned."""
        self._cancel()
        self._thread.close(CLOSE_WAIT_S)

    def metrics(self) -> dict[str, float]:
        """``schedule/..._waited_s`` since the last call: waits of the actor for samples and of the
        engines for weights; empty if they take turns."""
        if not self._overlap.is_beside:
            return {}
        found = {f"schedule/{who}_waited_s": waited for who, waited in self._waited_s.items()}
        self._waited_s = dict.fromkeys(self._waited_s, 0.0)
        return found

    def _sample(self, step: int) -> None:
        """Sample until the step can take its groups."""
        if not self._overlap.cuts_at_sync:
            # Grading starts with the first finished sample.
            grading = functools.partial(self._monitor.phase, "grade")
            self._generate(step, self._weights(step - 1), while_grading=grading)
            return
        began_s = time.monotonic()
        running = self._begin(step)
        with self._sampler.changed:
            while not self._sampler.poll():
                if running.done():
                    running.result()
                    raise RuntimeError("sampling ended before the step had its groups")
                self._sampler.changed.wait(LOOK_EVERY_S)
        self._waited_s["actor"] += time.monotonic() - began_s

    def _begin(self, step: int, ahead: bool = False) -> Future[None]:
        """Let the engines sample in the background. ``step``: the step that trains on it.
        ``ahead``: the step before is still running."""
        if self._idle_since_s is not None:
            self._waited_s["engines"] += time.monotonic() - self._idle_since_s
        self._set_step(step)
        weights = self._weights(step - 1 - ahead)
        self._running = self._thread.submit(lambda: self._generate(step, weights, ahead=ahead))
        return self._running

    def _generate(self, step: int, weights: str | None, **more: Any) -> None:
        pool, collector = self._run.sampling.pool, self._run.sampling.collector
        done = self._sampler.generate(step, pool, collector, weights=weights, **more)
        generation = pool.generation
        if generation is not None:
            done.engines = generation.summary()
            done.metrics |= generation.metrics()
        if not self._overlap.cuts_at_sync:
            done.metrics |= self._figures()
        self._idle_since_s = time.monotonic()

    def _figures(self) -> dict[str, float]:
        """Figures of engines and rewards since the last call."""
        sampling = self._run.sampling
        return sampling.pool.metrics() | sampling.rewards.metrics()

    def _end_sampling(self) -> None:
        """Wait until the engines finish their requests, or cut them."""
        running, self._running = self._running, None
        assert running is not None
        if self._overlap.cuts_at_sync:
            self._sampler.stop()
            # Repeated, because a call before the thread is in ``generate`` has no effect.
            while not running.done():
                self._run.sampling.pool.cut()
                with contextlib.suppress(TimeoutError):
                    running.result(timeout=1.0)
        running.result()

    def _cancel(self) -> None:
        if self._overlap.is_beside:
            self._sampler.cancel()
            self._run.sampling.collector.cancel()

    def _set_step(self, step: int) -> None:
        """Set the step of the next grades, since rewards may change over a run."""
        rewards = self._run.sampling.rewards
        rewards.set_step(step, self._run.config.runner.steps)

    def _weights(self, version: int) -> str | None:
        return weights_digest(self._run, self._monitor, version)


def weights_digest(run: Running, monitor: Monitor, version: int) -> str | None:
    """Digest of the weights that sample, and of how engines compute with them. ``version``: number
    of updates so far. Returns ``None``: it is not known."""
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
