"""The driver's side of the engines: starts, restarts and ends them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import ray

from rlmath.cluster.nodes import has_left
from rlmath.cluster.placement import EnginePlace
from rlmath.cluster.processes import end_actors
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.protocol import Engine
from rlmath.engines.requests import EngineError, EngineSpec, EngineStartError, Request
from rlmath.rollout.engine_process import EngineProcess
from rlmath.rollout.episodes import Episodes
from rlmath.rollout.generation import ANSWER_EVERY_S, Generation, MoreRequests
from rlmath.rollout.journal import StepJournal
from rlmath.types import Sample

if TYPE_CHECKING:
    from rlmath.weights.slices import WeightSlice

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 6.0


class Trainer(Protocol):
    """The holder of the weights that the engines sample with."""

    def release_cached_memory(self) -> None:
        """Return unused memory, for an engine that starts on the trainer's GPU."""

    def connect(self, engines: Sequence[Any]) -> None:
        """Connect to these engines in place of earlier ones."""

    def send_weights(self, version: int) -> None:
        """Send the present weights to the connected engines."""


class RolloutPool:
    """vLLM engines as Ray actors. A context manager; ``start`` is called on entry.

    Args:
        stall_timeout_s: Seconds without a token after which an engine with work counts as hung.
        max_restarts: Restarts of engines that died or hung; after these ``generate`` raises.
        places: Place of each engine; none: anywhere.
        trainer: Sends the current weights to restarted engines. ``None``: the engines have only
            the model folder's weights.
        episodes: Answer the turns of requests that have a problem; ``None``: there are none.
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
        episodes: Episodes | None = None,
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
        self._trainer, self._episodes = trainer, episodes
        # Whether the trainer still has the current weights. While it updates them, a restarted
        # engine waits for the next weight sync.
        self.has_weights_at_hand = True
        self._bringing_up = threading.Lock()
        self.restarts = 0  # Number of engine restarts so far.
        # Reason of the last engine failure, if it came before the first token.
        self._early_reason = ""
        self._restarts_told = 0
        self._generating = False
        self.generation: Generation | None = None  # The present generate, or the last one.
        self.weights_version = 0  # Version of the current weights.
        # Whether these are the model folder's, with which an engine starts. Version 0 can be
        # others: adapters of another run.
        self.has_folder_weights = spec.reads_weights
        # Number of weight syncs since an engine last started after which the engines' weights were
        # compared with the trainer's.
        self.verified_syncs = 0

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def engines(self) -> Sequence[Any]:
        """The engines' actor handles, for the trainer to send weights to."""
        return tuple(engine.handle for engine in self._engines)

    @property
    def processes(self) -> Sequence[EngineProcess]:
        return tuple(self._engines)

    @property
    def awaited_turns(self) -> list[tuple[str, int]]:
        """Problem and index of the samples whose turns the environment answers now."""
        return [] if self._episodes is None else self._episodes.waiting()

    def start(self) -> None:
        """Start all engines, in parallel. Raises EngineStartError: an engine could not start in
        time; none is left running."""
        self.launch()
        self.wait_until_ready()

    def prepare(self) -> None:
        """Create the engines' processes and return at once; they import vLLM and touch no GPU."""
        Path(self._spec.log_dir).mkdir(parents=True, exist_ok=True)
        self._engines = [self._make(index) for index in range(self._num_engines)]

    def launch(self) -> None:
        """Begin to start the engines and return at once, so that other parts start meanwhile."""
        if not self._engines:
            self.prepare()
        for engine in self._engines:
            engine.start()

    def wait_until_ready(self) -> None:
        """Wait for the starts that ``launch`` began. Raises EngineStartError: an engine could not
        start in time; none is left running."""
        try:
            while starting := self.starting():
                ready, _ = ray.wait(list(starting), num_returns=1, timeout=ANSWER_EVERY_S)
                for ref in ready:
                    self._finish_start(starting[ref])
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
        """Sample all requests; yields each sample once, as soon as it is finished.

        An engine is given requests whenever it has room, one by one, the least busy engine first
        (``generation.py``). A caller that stops early ends the unfinished requests.

        Args:
            more: Called after every answer of an engine for requests to add. It may wait when it
                learns that no engine has work; if it returns nothing then, the round ends.
            journal: Source of existing samples, which engines need not make; keeps the others.
            outlasts_engines: When no engine has the current weights any more, wait for
                :meth:`cut` instead of failing.

        Raises:
            ValueError: Two requests have one key, or one is longer than the engines' sequences.
            EngineError: An engine failed or stalled.
        """
        if self._generating:
            raise RuntimeError("generate was called while another call is not finished")
        # Even numbers: an abort ends a generation by going to the number after it.
        number = 2 if self.generation is None else self.generation.number + 2
        generation = Generation(
            self,
            number,
            self._stall_timeout_s,
            journal,
            outlasts_engines=outlasts_engines,
            episodes=self._episodes,
        )
        generation.add(requests)
        self.generation = generation
        self._generating = True
        try:
            yield from generation.samples(more)
        finally:
            self._generating = False

    def cut(self) -> None:
        """Cut the ``generate`` of another thread; see :meth:`Generation.cut`."""
        if self._generating and self.generation is not None:
            self.generation.cut()

    def take_weights_away(self) -> None:
        """Mark the current weights as being updated by the trainer.

        Waits for engines that are receiving them.
        """
        with self._bringing_up:
            self.has_weights_at_hand = False

    def set_version(self, version: int) -> None:
        """Record an update that the trainer has sent, and check every engine's version. Raises
        EngineError: an engine has another version."""
        for index, found in enumerate(self.ask(Engine.weights_version)):
            if found != version:
                raise EngineError(
                    f"engine {index} has weights version {found} after the update to {version}"
                )
        self.weights_version = version
        self.has_folder_weights = False
        self.has_weights_at_hand = True

    def connect(self) -> None:
        """Connect the trainer to all engines, which are ready."""
        if self._trainer is not None:
            self._trainer.connect(self.engines)

    def settle(self) -> None:
        """Wait for restarted engines and connect all engines, before new weights are sent; engines
        that wait for weights get these. Raises EngineError: an engine did not start, and no
        restarts are left."""
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
        """Return GPU memory to the actor; engines that do not share a GPU keep theirs."""
        if self._spec.sleeps:
            self.settle()
            self.ask(Engine.sleep)

    def wake(self, part: str) -> None:
        """Take back GPU memory for ``weights`` or ``kv_cache``; see ``sleep``."""
        if self._spec.sleeps:
            self.ask(Engine.wake, part)

    def metrics(self) -> dict[str, float]:
        """``rollout/engine_restarts`` since the last call, and the idle shares of the last
        ``generate``: over all engines, and of the idlest one."""
        count, self._restarts_told = self.restarts - self._restarts_told, self.restarts
        metrics = {"rollout/engine_restarts": float(count)}
        return metrics if self.generation is None else metrics | self.generation.metrics()

    def ask(
        self, method: Callable[Concatenate[Any, P], T], *arguments: P.args, **more: P.kwargs
    ) -> list[T]:
        """Results of a method of :class:`rlmath.engines.protocol.Engine`, such as
        ``ask(Engine.gpus)``, on each engine. Raises EngineError: an engine failed."""
        name = method.__name__
        refs = [getattr(one.handle, name).remote(*arguments, **more) for one in self._engines]
        return [engine.get(ref) for engine, ref in zip(self._engines, refs, strict=True)]

    def weights_fingerprints(self, part: WeightSlice | None = None) -> list[dict[str, int | None]]:
        """Fingerprints of each engine's weights; see ``Engine.weights_fingerprints``."""
        return self.ask(Engine.weights_fingerprints, part)

    def call_engines(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function(engine)`` with the ``LLMEngine`` of each engine: for tests and drills."""
        return self.ask(RolloutEngine.call_engine, function)

    def call_workers(self, function: Callable[[Any], Any]) -> list[list[Any]]:
        """``function(worker)`` in each vLLM worker, by engine: for tests and drills."""
        return self.ask(RolloutEngine.call_workers, function)

    def shutdown(self) -> None:
        """End the engines and their workers; kill those that do not end within seconds.

        An engine of one rank is a single process that leaves nothing, and is killed at once. A
        wider one has separate worker processes, which only the engine ends.
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

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _make(self, index: int) -> EngineProcess:
        # A restarted engine gets a cache of the size measured when its GPU was quiet: measured
        # beside ranks that now hold more, it would differ.
        spec = replace(self._spec, kv_cache_bytes=self._kv_cache_bytes.get(index))
        return EngineProcess(spec, index, self._places[index], self._start_timeout_s)

    def _finish_start(self, engine: EngineProcess) -> None:
        self._kv_cache_bytes[engine.index] = engine.finish_start()

    def starting(self) -> dict[Any, EngineProcess]:
        """Engines that are not ready yet, by their pending answer."""
        return {e.starting: e for e in self._engines if e.starting is not None}

    def replace(self, index: int, error: EngineError, unfinished: int = 0) -> None:
        """Restart an engine.

        Raises:
            EngineError: ``error``, if no restarts are left, or the engine's node is lost: another
                attempt has to place all of them again.
            EngineStartError: The last engine to fail before its first token raised the same error,
                so another start would not help.
        """
        reason = _without_numbers(error) if error.raised else ""
        is_early = bool(reason) and not self._engines[index].has_sampled
        if is_early and reason == self._early_reason:
            raise EngineStartError(
                f"{error}\nAn engine failed with this error before its first token twice, so "
                "starting it again would not help"
            ) from error
        self._early_reason = reason if is_early else ""
        if self.restarts >= self._max_restarts or has_left(self._places[index].node):
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
        """Send the current weights to restarted engines. ``starting``: the result of ``starting``.
        ``ready``: the answers that have arrived. Returns indices of engines that failed or took too
        long, and why."""
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
        self._finish_start(engine)
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
        """Have the current weights sent to an engine. As in every weight sync, it takes memory for
        its KV cache afterwards: the buffers of both sides have no room beside actor and cache."""
        if self._spec.sleeps:
            engine.get(engine.handle.sleep.remote())
            engine.get(engine.handle.wake.remote("weights"))
        trainer.connect([engine.handle])
        trainer.send_weights(self.weights_version)
        self.verified_syncs = 0
        if self._spec.sleeps:
            engine.get(engine.handle.wake.remote("kv_cache"))


def _without_numbers(error: EngineError) -> str:
    """An error's first line without numbers, so that it is the same for any engine or process."""
    return re.sub(r"\d+", "", str(error).split("\n", 1)[0])
