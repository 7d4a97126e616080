"""The driver's side of the engines: one queue of requests that all of them draw from."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from rlmath.cluster.processes import end_actors
from rlmath.rollout.engine_process import EngineProcess
from rlmath.rollout.requests import EngineError, EngineSpec, EngineStartError, Progress, Request
from rlmath.types import Sample

log = logging.getLogger(__name__)

# An engine answers at least this often, so that a stall is seen and named.
ANSWER_EVERY_S = 5.0
ABORT_TIMEOUT_S = 1.0
SHUTDOWN_TIMEOUT_S = 6.0

# Told whether no engine has work; gives requests to add.
MoreRequests = Callable[[bool], Sequence[Request]]


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
        actor_options: Ray options of each engine's actor (its place, its GPUs); none: anywhere.

    Attributes:
        bring_up: Called with the handles of engines that were started again and must get the
            weights in force, and with their version; to connect them and to send the weights.
            ``None``: there is no trainer, and the model folder's weights are all there is.
        reconnect: Called when engines were connected one by one and all have to be again.
        restarts: Engines started again so far.
        held: Of each engine, the requests that it has, by key.
        tokens: Of each engine, response tokens since its start.
        generation: Number of the present ``generate``, or of the last one.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_engines: int,
        stall_timeout_s: float,
        max_restarts: int = 0,
        start_timeout_s: float = 1800.0,
        actor_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if num_engines < 1:
            raise ValueError(f"num_engines must be at least 1, not {num_engines}")
        if actor_options is not None and len(actor_options) != num_engines:
            raise ValueError(
                f"{len(actor_options)} actor_options for {num_engines} engines: give one each"
            )
        self._spec = spec
        self._num_engines = num_engines
        self._stall_timeout_s = stall_timeout_s
        self._answer_every_s = min(ANSWER_EVERY_S, stall_timeout_s / 4)
        self._start_timeout_s = start_timeout_s
        self._actor_options = actor_options or [{}] * num_engines
        self._engines: list[EngineProcess] = []
        self._max_restarts = max_restarts
        self._apart = False
        self.bring_up: Callable[[Sequence[Any], int], None] | None = None
        self.reconnect: Callable[[], None] | None = None
        self.restarts = 0
        self._restarts_told = 0
        self.held: list[dict[tuple[str, int], Request]] = []
        self.tokens: list[int] = []
        self._generating = False
        # Even numbers: an abort ends one by going to the number after it.
        self.generation = 0
        self.weights_version = 0
        # Whether the engines' weights have been compared with the trainer's since they started.
        self.weights_verified = False

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

    def launch(self) -> None:
        """Begin to start the engines and return at once, so that other parts start meanwhile."""
        Path(self._spec.log_dir).mkdir(parents=True, exist_ok=True)
        self._engines = [self._make(index) for index in range(self._num_engines)]

    def wait_until_ready(self) -> None:
        """Wait for what ``launch`` began.

        Raises:
            EngineStartError: An engine could not start in time; none is left running.
        """
        try:
            while starting := self.starting():
                ready, _ = ray.wait(list(starting), num_returns=1, timeout=ANSWER_EVERY_S)
                for ref in ready:
                    starting[ref].started()
                for engine in starting.values():
                    engine.check_start_time()
        except EngineError as error:
            self.shutdown()
            raise EngineStartError(str(error)) from error
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self, requests: Sequence[Request], more: MoreRequests | None = None
    ) -> Iterator[Sample]:
        """Sample all requests; yields each sample once, as soon as it is there.

        An engine is given requests whenever it has room, the least busy one first, and a problem's
        samples together as long as they fit, so that one engine reads the prompt for all of them.
        A caller that stops early ends the unfinished requests.

        Args:
            requests: To begin with.
            more: Asked after every answer of an engine for requests to add. It may wait when it
                is told that no engine has work; nothing more from it then is the end.

        Raises:
            ValueError: Two requests have one key, or one is longer than the engines' sequences.
            EngineError: An engine failed or stalled.
        """
        if self._generating:
            raise RuntimeError("generate was called while another generate is not yet finished")
        unfinished: dict[tuple[str, int], Request] = {}
        seen: set[tuple[str, int]] = set()
        queue: deque[Request] = deque()

        def add(new: Sequence[Request]) -> None:
            keys = {request.key for request in new}
            if len(keys) != len(new) or keys & seen:
                raise ValueError(
                    f"{len(new)} requests have {len(keys - seen)} new keys (problem id, index): "
                    "each key may come once"
                )
            self._refuse_overlong(new)
            seen.update(keys)
            unfinished.update({request.key: request for request in new})
            queue.extend(new)

        add(requests)
        held = self.held = [{} for _ in self._engines]
        self.tokens = [0] * len(self._engines)
        # The answer that each busy engine owes, and since when it is waited for.
        answers: dict[Any, int] = {}
        waited_s = [0.0] * len(self._engines)
        self._generating = True
        self.generation += 2
        try:
            self._top_up(queue, held, answers)
            while True:
                if more is not None and (new := more(not answers and not queue)):
                    add(new)
                    self._top_up(queue, held, answers)
                if not answers and not queue:
                    break
                waiting_since = time.monotonic()
                starting = self.starting()
                ready, _ = ray.wait(
                    [*answers, *starting], num_returns=1, timeout=self._answer_every_s
                )
                waited = time.monotonic() - waiting_since
                for index in answers.values():
                    waited_s[index] += waited
                samples: list[Sample] = []
                for ref in ready:
                    if ref in starting:
                        continue
                    index = answers.pop(ref)
                    waited_s[index] = 0.0
                    try:
                        samples += self._take(ref, index, held[index])
                    except EngineError as error:
                        self._replace(index, error, queue, held[index])
                for ref, index in list(answers.items()):
                    try:
                        self._check_stall(index, waited_s[index], len(held[index]), held[index])
                    except EngineError as error:
                        del answers[ref]
                        waited_s[index] = 0.0
                        self._replace(index, error, queue, held[index])
                for ref, engine in starting.items():
                    try:
                        engine.check_start_time()
                        if ref in ready:
                            self._bring_up(engine)
                    except EngineError as error:
                        self._replace(engine.index, error, queue, held[engine.index])
                # Engines first, so that they work on while the caller looks at the samples.
                self._top_up(queue, held, answers)
                for sample in samples:
                    del unfinished[(sample.problem_id, sample.index)]
                    yield sample
            if unfinished:
                raise EngineError(f"{len(unfinished)} requests got no sample: {list(unfinished)}")
        finally:
            self._generating = False
            if any(held):
                self._abort(answers)

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

    def settle(self) -> None:
        """Wait for engines that were started again, and have all of them connected; before new
        weights are sent.

        Raises:
            EngineError: One did not start, and no more restarts are left.
        """
        while starting := self.starting():
            ready, _ = ray.wait(list(starting), num_returns=1, timeout=ANSWER_EVERY_S)
            for ref, engine in starting.items():
                try:
                    engine.check_start_time()
                    if ref in ready:
                        self._bring_up(engine)
                except EngineError as error:
                    self._replace(engine.index, error, deque(), {})
        if self._apart and self.reconnect is not None:
            self.reconnect()
        self._apart = False

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
        """``rollout/engine_restarts`` since the last call."""
        count, self._restarts_told = self.restarts - self._restarts_told, self.restarts
        return {"rollout/engine_restarts": float(count)}

    def stats(self) -> list[dict[str, int]]:
        """Of each engine: requests that it has, tokens generated, version of its weights."""
        return self._all("stats")

    def weights_checksums(self) -> list[dict[str, str]]:
        """Of each engine: SHA-256 of each parameter; see ``RolloutEngine.weights_checksums``."""
        return self._all("weights_checksums")

    def weights_fingerprints(self) -> list[dict[str, int]]:
        """Of each engine; see ``RolloutEngine.weights_fingerprints``."""
        return self._all("weights_fingerprints")

    def shutdown(self) -> None:
        """End the engines and their workers; what does not end in seconds is killed.

        An engine of one rank is a single process that leaves nothing, and is killed at once. The
        workers of a wider one are processes of their own, which only the engine ends.
        """
        engines, self._engines = self._engines, []
        if engines and self._spec.tensor_parallel > 1:
            refs = [engine.handle.shutdown.remote() for engine in engines]
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_TIMEOUT_S)
        end_actors([e.handle for e in engines], [e.place() for e in engines])

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

    def _top_up(
        self,
        queue: deque[Request],
        held: list[dict[tuple[str, int], Request]],
        answers: dict[Any, int],
    ) -> None:
        """Deal requests to the engines that are not waited for, and wait for all busy ones."""
        free = [
            index
            for index, engine in enumerate(self._engines)
            if engine.starting is None and index not in answers.values()
        ]
        dealt: dict[int, list[Request]] = {index: [] for index in free}
        capacity = self._spec.max_running_sequences
        while queue and free:
            index = min(free, key=lambda i: len(held[i]))
            if len(held[index]) >= capacity:
                break
            problem_id = queue[0].problem_id
            while queue and queue[0].problem_id == problem_id and len(held[index]) < capacity:
                request = queue.popleft()
                held[index][request.key] = request
                dealt[index].append(request)
        for index in free:
            if held[index]:
                engine = self._engines[index].handle
                arguments = (self.generation, dealt[index], self._answer_every_s)
                answers[engine.exchange.remote(*arguments)] = index

    def _take(self, ref: Any, index: int, held: dict[tuple[str, int], Request]) -> Sequence[Sample]:
        """The samples of an engine's answer; nothing has changed when it raises."""
        progress: Progress = self._engines[index].get(ref)
        self.tokens[index] = progress.tokens_generated
        left = held.keys() - {(sample.problem_id, sample.index) for sample in progress.samples}
        if left and not progress.unfinished:
            raise EngineError(
                f"engine {index} has no work but owes {len(left)} samples: {sorted(left)[:5]}"
                + self._engines[index].end_of_log()
            )
        for sample in progress.samples:
            del held[(sample.problem_id, sample.index)]
        # What it finished counts, also when it hangs with the rest: that is seen next time.
        if not progress.samples:
            self._check_stall(index, progress.quiet_s, progress.unfinished, held)
        return progress.samples

    def _make(self, index: int) -> EngineProcess:
        options = self._actor_options[index]
        return EngineProcess(self._spec, index, options, self._start_timeout_s)

    def starting(self) -> dict[Any, EngineProcess]:
        """Engines that are not ready yet, by the answer that they owe."""
        return {e.starting: e for e in self._engines if e.starting is not None}

    def _replace(
        self, index: int, error: EngineError, queue: deque[Request], held: dict[Any, Request]
    ) -> None:
        """Start an engine again; what it had goes back to the head of the queue.

        Its requests have the same seeds, so that their samples are the same.

        Raises:
            EngineError: No more restarts are left.
        """
        if self.restarts >= self._max_restarts:
            raise error
        self.restarts += 1
        log.warning(
            "%s\nengine %d is started again (%d of rollout.max_engine_restarts=%d); %d requests "
            "are run again",
            error,
            index,
            self.restarts,
            self._max_restarts,
            len(held),
        )
        self._engines[index].kill()
        queue.extendleft(reversed(held.values()))
        held.clear()
        self._engines[index] = self._make(index)

    def _bring_up(self, engine: EngineProcess) -> None:
        """Bring an engine that has started again to the weights in force."""
        engine.started()
        self._apart = True
        if self.weights_version and self.bring_up is not None:
            self.bring_up([engine.handle], self.weights_version)
        found = engine.get(engine.handle.weights_version.remote())
        if found != self.weights_version:
            raise EngineError(
                f"engine {engine.index} has weights version {found} after its restart, and not "
                f"{self.weights_version}"
            )

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        refs = [getattr(engine.handle, method).remote(*arguments) for engine in self._engines]
        return [engine.get(ref) for engine, ref in zip(self._engines, refs, strict=True)]

    def _refuse_overlong(self, requests: Sequence[Request]) -> None:
        longest = self._spec.max_sequence_tokens
        for request in requests:
            prompt = len(request.prompt_token_ids)
            if prompt + request.max_tokens > longest:
                raise ValueError(
                    f"{request.problem_id}: a prompt of {prompt} and a response of up to "
                    f"{request.max_tokens} tokens make {prompt + request.max_tokens}, more than "
                    f"the engines' longest sequence of {longest}"
                )

    def _check_stall(
        self, index: int, quiet_s: float, unfinished: int, held: Mapping[Any, Request]
    ) -> None:
        if quiet_s <= self._stall_timeout_s or not held:
            return
        oldest = next(iter(held.values()))
        raise EngineError(
            f"engine {index} has given no token for {quiet_s:.0f} s (rollout.stall_timeout_s="
            f"{self._stall_timeout_s:g}) with {unfinished} unfinished requests; the oldest is "
            f"sample {oldest.index} of problem {oldest.problem_id}"
            + self._engines[index].end_of_log()
        )

    def _abort(self, answers: Mapping[Any, int]) -> None:
        """After an early end: leave no request in an engine, now or when it wakes up."""
        refs = [engine.handle.abort.remote(self.generation) for engine in self._engines]
        ray.wait(
            refs + list(answers), num_returns=len(refs) + len(answers), timeout=ABORT_TIMEOUT_S
        )
