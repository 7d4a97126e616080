"""The driver's side of the engines: one queue of requests that all of them draw from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlmath.cluster.logs import end_of
from rlmath.rollout.engine import RolloutEngine
from rlmath.rollout.requests import EngineError, EngineSpec, EngineStartError, Progress, Request
from rlmath.types import Sample

# An engine answers at least this often, so that a stall is seen and named.
ANSWER_EVERY_S = 5.0
ABORT_TIMEOUT_S = 1.0
SHUTDOWN_TIMEOUT_S = 6.0


class RolloutPool:
    """vLLM engines as Ray actors. A context manager; ``start`` is called on entry.

    Args:
        spec: How each engine is set up.
        num_engines: Engines.
        stall_timeout_s: Seconds without a token from an engine that has work, after which
            ``generate`` raises.
        start_timeout_s: Seconds that the engines may take to start.
        actor_options: Ray options of each engine's actor (its place, its GPUs); none: anywhere.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_engines: int,
        stall_timeout_s: float,
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
        self._engines: list[Any] = []
        self._generating = False
        # Even numbers: an abort ends one by going to the number after it.
        self._generation = 0
        self.weights_version = 0

    @property
    def spec(self) -> EngineSpec:
        """How each engine is set up."""
        return self._spec

    @property
    def engines(self) -> Sequence[Any]:
        """The engines' actor handles, for the trainer to send weights to."""
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
        self._engines = [
            _make_actor(self._spec, index, options)
            for index, options in enumerate(self._actor_options)
        ]
        self._starting = {
            engine.start.remote(): index for index, engine in enumerate(self._engines)
        }

    def wait_until_ready(self) -> None:
        """Wait for what ``launch`` began.

        Raises:
            EngineStartError: An engine could not start in time; none is left running.
        """
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while self._starting:
                left_s = max(0.0, deadline - time.monotonic())
                ready, _ = ray.wait(list(self._starting), num_returns=1, timeout=left_s)
                if not ready:
                    index = next(iter(self._starting.values()))
                    raise EngineStartError(
                        f"engine {index} was not ready after {self._start_timeout_s:g} s"
                        + end_of(self._spec.log_path(index))
                    )
                index = self._starting.pop(ready[0])
                try:
                    ray.get(ready[0])
                except RayError as error:
                    raise EngineStartError(
                        f"engine {index} could not start: {_reason(error)}"
                        + end_of(self._spec.log_path(index))
                    ) from error
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Sample all requests; yields each sample once, as soon as it is there.

        An engine is given requests whenever it has room, the least busy one first, and a problem's
        samples together as long as they fit, so that one engine reads the prompt for all of them.
        A caller that stops early ends the unfinished requests.

        Raises:
            ValueError: Two requests have one key, or one is longer than the engines' sequences.
            EngineError: An engine failed or stalled.
        """
        if self._generating:
            raise RuntimeError("generate was called while another generate is not yet finished")
        unfinished = {request.key: request for request in requests}
        if len(unfinished) != len(requests):
            raise ValueError(
                f"{len(requests)} requests have {len(unfinished)} keys (problem id, index): each "
                "key may come once"
            )
        self._refuse_overlong(requests)
        queue = deque(requests)
        held: list[dict[tuple[str, int], Request]] = [{} for _ in self._engines]
        # The answer that each busy engine owes, and since when it is waited for.
        answers: dict[Any, int] = {}
        waited_s = [0.0] * len(self._engines)
        self._generating = True
        self._generation += 2
        try:
            self._top_up(queue, held, answers)
            while answers:
                waiting_since = time.monotonic()
                ready, _ = ray.wait(list(answers), num_returns=1, timeout=self._answer_every_s)
                waited = time.monotonic() - waiting_since
                for index in answers.values():
                    waited_s[index] += waited
                samples: list[Sample] = []
                for ref in ready:
                    index = answers.pop(ref)
                    waited_s[index] = 0.0
                    progress = self._answer(ref, index)
                    for sample in progress.samples:
                        del held[index][(sample.problem_id, sample.index)]
                    samples += progress.samples
                    if held[index] and not progress.unfinished:
                        raise EngineError(
                            f"engine {index} has no work but owes {len(held[index])} samples: "
                            f"{list(held[index])[:5]}" + end_of(self._spec.log_path(index))
                        )
                    self._check_stall(index, progress.quiet_s, progress.unfinished, held[index])
                for index in answers.values():
                    self._check_stall(index, waited_s[index], len(held[index]), held[index])
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
        refs = [engine.weights_version.remote() for engine in self._engines]
        for index, ref in enumerate(refs):
            found = self._get(ref, index)
            if found != version:
                raise EngineError(
                    f"engine {index} has weights version {found} after the update to {version}"
                )
        self.weights_version = version

    def sleep(self) -> None:
        """Give GPU memory back to the actor; engines that do not share it keep theirs."""
        if self._spec.sleeps:
            self._all("sleep")

    def wake(self, part: str) -> None:
        """Take GPU memory for ``weights`` or ``kv_cache`` again; see ``sleep``."""
        if self._spec.sleeps:
            self._all("wake", part)

    def stats(self) -> list[dict[str, int]]:
        """Of each engine: requests that it has, tokens generated, version of its weights."""
        return self._all("stats")

    def weights_checksums(self) -> list[dict[str, str]]:
        """Of each engine: SHA-256 of each parameter; see ``RolloutEngine.weights_checksums``."""
        return self._all("weights_checksums")

    def shutdown(self) -> None:
        """End the engines and their workers; what does not end in seconds is killed.

        An engine of one rank is a single process that leaves nothing, and is killed at once. The
        workers of a wider one are processes of their own, which only the engine ends.
        """
        engines, self._engines = self._engines, []
        self._starting = {}
        if engines and self._spec.tensor_parallel > 1:
            refs = [engine.shutdown.remote() for engine in engines]
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_TIMEOUT_S)
        for engine in engines:
            ray.kill(engine, no_restart=True)

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
        free = [index for index in range(len(self._engines)) if index not in answers.values()]
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
                engine = self._engines[index]
                arguments = (self._generation, dealt[index], self._answer_every_s)
                answers[engine.exchange.remote(*arguments)] = index

    def _answer(self, ref: Any, index: int) -> Progress:
        progress: Progress = self._get(ref, index)
        return progress

    def _get(self, ref: Any, index: int) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            raise EngineError(
                f"engine {index} failed: {_reason(error)}" + end_of(self._spec.log_path(index))
            ) from error

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        refs = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return [self._get(ref, index) for index, ref in enumerate(refs)]

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
            + end_of(self._spec.log_path(index))
        )

    def _abort(self, answers: Mapping[Any, int]) -> None:
        """After an early end: leave no request in an engine, now or when it wakes up."""
        refs = [engine.abort.remote(self._generation) for engine in self._engines]
        ray.wait(
            refs + list(answers), num_returns=len(refs) + len(answers), timeout=ABORT_TIMEOUT_S
        )


def _make_actor(spec: EngineSpec, index: int, options: Mapping[str, Any]) -> Any:
    environment = spec.environment()
    actor = ray.remote(RolloutEngine).options(
        **{
            "num_cpus": 0,
            # Updates come from the trainer while the pool may be waiting for samples.
            "max_concurrency": 8,
            "max_restarts": 0,
            "runtime_env": {"env_vars": environment},
            **options,
        }
    )
    return actor.remote(spec, index, environment)


def _reason(error: RayError) -> str:
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        return "its process ended. " + str(error).strip().splitlines()[-1]
    if isinstance(error, GetTimeoutError):
        return "it did not answer in time"
    return str(error)
