"""The driver's side of the engines: started, started again when they fail, and ended."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import ray

from rlmath.cluster.placement import EnginePlace
from rlmath.cluster.processes import end_actors
from rlmath.engines.requests import EngineError, EngineSpec, EngineStartError, Request
from rlmath.rollout.engine_process import EngineProcess
from rlmath.rollout.generation import ANSWER_EVERY_S, Generation, MoreRequests
from rlmath.rollout.journal import StepJournal
from rlmath.types import Sample

if TYPE_CHECKING:
    from rlmath.engines.layer_values import Noted
    from rlmath.weights.slices import WeightSlice

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 6.0


class Trainer(Protocol):
    """Who has the weights that the engines sample with."""

    def release_cached_memory(self) -> None:
        """Give back memory that is not used, for an engine that starts on the trainer's GPU."""

    def connect(self, engines: Sequence[Any]) -> None:
        """Meet these engines, in the place of those that were met before."""

    def send_weights(self, version: int) -> None:
        """Send the present weights to the engines that were met."""


class RolloutPool:
    """vLLM engines as Ray actors. A context manager; ``start`` is called on entry.

    Args:
        spec: How each engine is set up.
        num_engines: Engines.
        stall_timeout_s: Seconds without a token from an engine that has work, after which it
            counts as hung.
        max_restarts: Engines that may be started again after they died or hung; the next one
            makes ``generate`` raise.
        start_timeout_s: Seconds that the engines may take to start.
        places: Where each engine goes; none: anywhere.
        trainer: Sends the weights in force to engines that were started again. ``None``: the model
            folder's weights are all there is.

    Attributes:
        has_weights_at_hand: Whether the trainer still has the weights in force. While it updates
            them an engine that is started again waits for the next weight sync.
        restarts: Engines started again so far.
        generation: The present ``generate``, or the last one.
        weights_version: Of the weights in force.
        has_folder_weights: These are the model folder's, with which an engine starts. Version 0 can
            be others: adapters of another run.
        verified_syncs: After how many weight syncs the engines' weights were compared with the
            trainer's since one of them started.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_engines: int,
        stall_timeout_s: float,
        max_restarts: int = 0,
        start_timeout_s: float = 1800.0,
        places: Sequence[EnginePlace] | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        if num_engines < 1:
            raise ValueError(f"num_engines must be at least 1, not {num_engines}")
        if places is not None and len(places) != num_engines:
            raise ValueError(f"{len(places)} places for {num_engines} engines: give one each")
        self._spec = spec
        self._num_engines = num_engines
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._places = places or [EnginePlace()] * num_engines
        self._kv_cache_bytes: dict[int, int | None] = {}
        self._engines: list[EngineProcess] = []
        self._max_restarts = max_restarts
        self._apart = False
        self._trainer = trainer
        self.has_weights_at_hand = True
        self._bringing_up = threading.Lock()
        self.restarts = 0
        # Why the last engine failed, if it was before its first token.
        self._early_reason = ""
        self._restarts_told = 0
        self._generating = False
        self.generation: Generation | None = None
        self.weights_version = 0
        self.has_folder_weights = spec.reads_weights
        self.verified_syncs = 0

    @property
    def spec(self) -> EngineSpec:
        """How each engine is set up."""
        return self._spec

    @property
    def engines(self) -> Sequence[Any]:
        """The engines' actor handles, for the trainer to send weights to."""
        return tuple(engine.handle for engine in self._engines)

    @property
    def processes(self) -> Sequence[EngineProcess]:
        """The engines' processes."""
        return tuple(self._engines)

    def start(self) -> None:
        """Start all engines, in parallel.

        Raises:
            EngineStartError: One could not start in time; none is left running.
        """
        self.launch()
        self.wait_until_ready()

    def prepare(self) -> None:
        """Make the engines' processes and return at once; they import vLLM and touch no GPU."""
        Path(self._spec.log_dir).mkdir(parents=True, exist_ok=True)
        self._engines = [self._make(index) for index in range(self._num_engines)]

    def launch(self) -> None:
        """Begin to start the engines and return at once, so that other parts start meanwhile."""
        if not self._engines:
            self.prepare()
        for engine in self._engines:
            engine.start()

    def wait_until_ready(self) -> None:
        """Wait for what ``launch`` began.

        Raises:
            EngineStartError: An engine could not start in time; none is left running.
        """
        try:
            while starting := self.starting():
                ready, _ = ray.wait(list(starting), num_returns=1, timeout=ANSWER_EVERY_S)
                for ref in ready:
                    self._started(starting[ref])
                for engine in starting.values():
                    engine.check_start_time()
        except EngineError as error:
            self.shutdown()
            raise EngineStartError(str(error)) from error
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        requests: Sequence[Request],
        more: MoreRequests | None = None,
        journal: StepJournal | None = None,
        *,
        outlasts_engines: bool = False,
    ) -> Iterator[Sample]:
        """Sample all requests; yields each sample once, as soon as it is there.

        An engine is given requests whenever it has room, one by one, the least busy engine first
        (``generation.py``). A caller that stops early ends the unfinished requests.

        Args:
            requests: To begin with.
            more: Asked after every answer of an engine for requests to add. It may wait when it
                is told that no engine has work; nothing more from it then is the end.
            journal: Samples that it has are not asked of the engines; it keeps the others.
            outlasts_engines: When no engine has the weights in force any more, wait for
                :meth:`cut` instead of failing.

        Raises:
            ValueError: Two requests have one key, or one is longer than the engines' sequences.
            EngineError: An engine failed or stalled.
        """
        if self._generating:
            raise RuntimeError("generate was called while another call is not finished")
        # Even numbers: an abort ends one by going to the number after it.
        number = 2 if self.generation is None else self.generation.number + 2
        generation = Generation(
            self, number, self._stall_timeout_s, journal, outlasts_engines=outlasts_engines
        )
        generation.add(requests)
        self.generation = generation
        self._generating = True
        try:
            yield from generation.samples(more)
        finally:
            self._generating = False

    def cut(self) -> None:
        """End the ``generate`` that another thread is in; see :meth:`Generation.cut`."""
        if self._generating and self.generation is not None:
            self.generation.cut()

    def take_weights_away(self) -> None:
        """The trainer begins to update the weights in force.

        Waits for engines that are getting them just now.
        """
        with self._bringing_up:
            self.has_weights_at_hand = False

    def set_version(self, version: int) -> None:
        """Note an update that the trainer has sent; asks every engine whether it has it.

        Raises:
            EngineError: An engine has another version.
        """
        for index, found in enumerate(self._all("weights_version")):
            if found != version:
                raise EngineError(
                    f"engine {index} has weights version {found} after the update to {version}"
                )
        self.weights_version = version
        self.has_folder_weights = False
        self.has_weights_at_hand = True

    def connect(self) -> None:
        """Have the trainer meet all engines, which are ready."""
        if self._trainer is not None:
            self._trainer.connect(self.engines)

    def settle(self) -> None:
        """Wait for engines that were started again, and have all of them connected; before new
        weights are sent, which those get that wait for weights.

        Raises:
            EngineError: One did not start, and no more restarts are left.
        """
        while starting := self.starting():
            ready, _ = ray.wait(list(starting), num_returns=1, timeout=ANSWER_EVERY_S)
            for index, error in self.bring_up_started(starting, ready):
                self.replace(index, error)
        if self._apart:
            self.connect()
        self._apart = False
        for engine in self._engines:
            engine.waits_for_weights = False

    def sleep(self) -> None:
        """Give GPU memory back to the actor; engines that do not share it keep theirs."""
        if self._spec.sleeps:
            self.settle()
            self._all("sleep")

    def wake(self, part: str) -> None:
        """Take GPU memory for ``weights`` or ``kv_cache`` again; see ``sleep``."""
        if self._spec.sleeps:
            self._all("wake", part)

    def metrics(self) -> dict[str, float]:
        """``rollout/engine_restarts`` since the last call, and ``rollout/idle_share`` of the last
        ``generate``: of the engines' time the share in which they had no work, and of the idlest
        engine's."""
        count, self._restarts_told = self.restarts - self._restarts_told, self.restarts
        metrics = {"rollout/engine_restarts": float(count)}
        return metrics if self.generation is None else metrics | self.generation.metrics()

    def stats(self) -> list[dict[str, int]]:
        """Of each engine: requests that it has, tokens generated, version of its weights."""
        return self._all("stats")

    def weights_checksums(self) -> list[dict[str, str]]:
        """Of each engine: SHA-256 of each parameter; see ``RolloutEngine.weights_checksums``."""
        return self._all("weights_checksums")

    def weights_fingerprints(self, part: WeightSlice | None = None) -> list[dict[str, int | None]]:
        """Of each engine; see ``RolloutEngine.weights_fingerprints``."""
        return self._all("weights_fingerprints", part)

    def constants(self) -> list[list[dict[str, Any]]]:
        """Of each engine's workers; see ``Engine.constants``."""
        return self._all("constants")

    def parameter_sums(self) -> list[list[dict[str, int]]]:
        """Of each engine's workers; see ``Engine.parameter_sums``."""
        return self._all("parameter_sums")

    def layer_values(self, tokens: list[int]) -> list[list[Noted] | None]:
        """Of each engine; see ``Engine.layer_values``."""
        return self._all("layer_values", tokens)

    def cached_blocks(self) -> list[int]:
        """Of each engine; see ``Engine.cached_blocks``."""
        return self._all("cached_blocks")

    def kv_cache_tokens(self) -> list[int]:
        """Of each engine; see ``Engine.kv_cache_tokens``."""
        return self._all("kv_cache_tokens")

    def gpus(self) -> list[list[str]]:
        """Of each engine's workers; see ``Engine.gpus``."""
        return self._all("gpus")

    def call_engines(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function(engine)`` with the ``LLMEngine`` of each engine: for tests and drills."""
        return self._all("call_engine", function)

    def call_workers(self, function: Callable[[Any], Any]) -> list[list[Any]]:
        """``function(worker)`` in each vLLM worker, by engine: for tests and drills."""
        return self._all("call_workers", function)

    def shutdown(self) -> None:
        """End the engines and their workers; what does not end in seconds is killed.

        An engine of one rank is a single process that leaves nothing, and is killed at once. The
        workers of a wider one are separate processes, which only the engine ends.
        """
        engines, self._engines = self._engines, []
        is_wide = self._spec.tensor_parallel > 1
        if engines and is_wide:
            refs = [engine.handle.shutdown.remote() for engine in engines]
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_TIMEOUT_S)
        places = [engine.place() for engine in engines]
        end_actors([engine.handle for engine in engines], places, have_children=is_wide)

    def __enter__(self) -> RolloutPool:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _make(self, index: int) -> EngineProcess:
        # One that is started again gets a cache of the size that was measured when its GPU was
        # quiet: measured beside ranks that hold more than then, it would be another.
        spec = replace(self._spec, kv_cache_bytes=self._kv_cache_bytes.get(index))
        return EngineProcess(spec, index, self._places[index], self._start_timeout_s)

    def _started(self, engine: EngineProcess) -> None:
        self._kv_cache_bytes[engine.index] = engine.started()

    def starting(self) -> dict[Any, EngineProcess]:
        """Engines that are not ready yet, by the answer that they owe."""
        return {e.starting: e for e in self._engines if e.starting is not None}

    def replace(self, index: int, error: EngineError, unfinished: int = 0) -> None:
        """Start an engine again.

        Args:
            index: Its number.
            error: What became of it.
            unfinished: Requests that it had.

        Raises:
            EngineError: ``error``, when no more restarts are left.
            EngineStartError: The last engine to fail before its first token raised the same error:
                another start would not help.
        """
        reason = _without_numbers(error) if error.raised else ""
        is_early = bool(reason) and not self._engines[index].has_sampled
        if is_early and reason == self._early_reason:
            raise EngineStartError(
                f"{error}\nAn engine failed with this error before its first token twice, so "
                "starting it again would not help"
            ) from error
        self._early_reason = reason if is_early else ""
        if self.restarts >= self._max_restarts:
            raise error
        self.restarts += 1
        log.warning(
            "%s\nRestarting %s %d (%d of rollout.max_engine_restarts=%d); %d requests are repeated",
            error,
            self._spec.role,
            index,
            self.restarts,
            self._max_restarts,
            unfinished,
        )
        self._engines[index].kill()
        if self._trainer is not None and self._spec.sleeps:
            self._trainer.release_cached_memory()
        self._engines[index] = self._make(index)
        self._engines[index].start()

    def bring_up_started(
        self, starting: Mapping[Any, EngineProcess], ready: Sequence[Any]
    ) -> list[tuple[int, EngineError]]:
        """Bring engines that have started again to the weights in force.

        Args:
            starting: As ``starting`` gave it.
            ready: Answers that are there.

        Returns:
            Those that failed, or had too long, and why.
        """
        failed = []
        for ref, engine in starting.items():
            try:
                engine.check_start_time()
                if ref in ready:
                    self._bring_up(engine)
            except EngineError as error:
                failed.append((engine.index, error))
        return failed

    def _bring_up(self, engine: EngineProcess) -> None:
        self._started(engine)
        self._apart = True
        with self._bringing_up:
            if not self.has_folder_weights and not self.has_weights_at_hand:
                engine.waits_for_weights = True
                self.verified_syncs = 0
                return
            if not self.has_folder_weights and self._trainer is not None:
                self._get_weights(engine, self._trainer)
        found = engine.get(engine.handle.weights_version.remote())
        if found != self.weights_version:
            raise EngineError(
                f"{self._spec.role} {engine.index} has weights version {found} after its restart, "
                f"not {self.weights_version}"
            )

    def _get_weights(self, engine: EngineProcess, trainer: Trainer) -> None:
        """Have the weights in force sent to an engine. As in every weight sync, it takes memory for
        its KV cache after them: the buffers of both sides have no room beside actor and cache."""
        if self._spec.sleeps:
            engine.get(engine.handle.sleep.remote())
            engine.get(engine.handle.wake.remote("weights"))
        trainer.connect([engine.handle])
        trainer.send_weights(self.weights_version)
        self.verified_syncs = 0
        if self._spec.sleeps:
            engine.get(engine.handle.wake.remote("kv_cache"))

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        refs = [getattr(engine.handle, method).remote(*arguments) for engine in self._engines]
        return [engine.get(ref) for engine, ref in zip(self._engines, refs, strict=True)]


def _without_numbers(error: EngineError) -> str:
    """An error as it is called for any engine, process and tensor."""
    return re.sub(r"\d+", "", str(error).split("\n", 1)[0])
