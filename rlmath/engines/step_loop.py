"""One vLLM engine and the thread that steps it.

vLLM's engine is not thread-safe, so everything that touches it, including its creation, runs in one
thread: it steps while there is work, and between steps it runs other threads' calls. This module
imports vLLM only when an engine is created.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from rlmath.engines.decoded_rows import DecodedRows
from rlmath.engines.engine_workers import (
    bind_worker_to_gpu,
    check_gpus,
    smallest,
    unlink_worker_segments,
    worker_gpu,
    worker_kv_cache_bytes,
)
from rlmath.engines.patches.cpu_imports import without_compiler
from rlmath.engines.patches.engine_precision import check_workers, worker_precision
from rlmath.engines.patches.register import require_plugin
from rlmath.engines.requests import EngineSpec, Progress, Request, prompt_digest
from rlmath.engines.running_request import RunningRequest
from rlmath.types import ONE_TURN, FinishReason, Sample
from rlmath.utils.paused_collector import paused_collector
from rlmath.utils.seed_stream import skip

T = TypeVar("T")

# Time to gather more samples after the first finished one before answering. Answers cost the
# engine's process time that it could spend on tokens.
GATHER_S = 0.1


def import_vllm(device: str) -> None:
    """Import the modules for creating an engine, which takes seconds. ``device``: ``cuda`` or
    ``cpu``."""
    # Loaded by name when a worker is created, in this process for an engine of one rank.
    worker = "gpu_worker" if device == "cuda" else "cpu_worker"
    with paused_collector(), _quickly(device):
        importlib.import_module("vllm.v1.engine.llm_engine")
        importlib.import_module(f"vllm.v1.worker.{worker}")


def _quickly(device: str) -> contextlib.AbstractContextManager[None]:
    return without_compiler() if device == "cpu" else contextlib.nullcontext()


class StepLoop:
    """Owns the engine. ``submit``, ``progress`` and ``call`` are thread-safe.

    With asynchronous scheduling vLLM starts a step on the GPU before it has read the previous one,
    so a step may still be running when its last request has finished or was aborted. The loop waits
    for such steps before the engine counts as idle: nothing computes with the weights while they
    change, or while the engine sleeps.
    """

    def __init__(self, spec: EngineSpec, engine_index: int) -> None:
        self._spec = spec
        self._index = engine_index
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self._finished: list[Sample] = []
        self._unfinished = 0
        self._generation = 0
        # The generation whose current and later requests are cut; 0: none.
        self._cut_generation = 0
        self._tokens_generated = 0
        self._tokens_held = 0
        self._tokens_reused = 0
        self._last_token_s = time.monotonic()
        self._failure: BaseException | None = None
        # Used only by the thread.
        self._engine: Any = None
        self._tokenizer: Any = None
        self._running: dict[str, RunningRequest] = {}
        self._decoded = DecodedRows()
        self._num_submitted = 0
        # Whether a wrong number of rows of routes was reported.
        self._told_of_rows = False
        self._thread = threading.Thread(target=self._run, name="vllm-steps", daemon=True)
        # The adapters of requests; none before the first weight sync.
        self._adapters: Any = None
        self.weights_version = 0  # Version of the active weights.
        # Size of each rank's KV cache; None if vLLM does not measure it (CPU), or before start.
        self.kv_cache_bytes: int | None = None

    def start(self) -> None:
        """Create the engine; returns when it can sample. Raises Exception: vLLM's error about
        settings, model or memory."""
        ready: Future[None] = Future()
        self._calls.put((self._make_engine, ready))
        self._thread.start()
        ready.result()

    def submit(self, generation: int, requests: Sequence[Request]) -> None:
        """Add requests to the engine.

        Requests of an older generation are dropped, and late ones are ignored: a call that its
        caller has abandoned may still arrive. Raises ValueError: a request exceeds the engine's
        maximum sequence length.
        """
        self.call(lambda: self._add(generation, requests))

    def cut(self, generation: int) -> None:
        """End all requests of a generation where they are, including late ones.

        ``progress`` returns each with its tokens so far, as a ``cut`` sample.
        """
        self.call(lambda: self._cut(generation))

    def progress(self, generation: int, timeout_s: float) -> Progress:
        """Samples of this generation that finished since the last call.

        Waits until there is one, the engine has no work, or ``timeout_s`` has passed. Raises
        BaseException: the error that stopped the thread, if any.
        """
        deadline = time.monotonic() + timeout_s

        def over() -> bool:
            return bool(self._failure) or not self._unfinished or self._generation != generation

        with self._changed:
            self._changed.wait_for(lambda: self._finished or over(), timeout_s)
            if not over():
                rest_s = max(0.0, min(GATHER_S, deadline - time.monotonic()))
                self._changed.wait_for(over, rest_s)
            if self._failure:
                raise self._failure
            if self._generation != generation:
                return Progress((), 0, self._tokens_generated, 0, 0.0)
            samples, self._finished = tuple(self._finished), []
            reused, self._tokens_reused = self._tokens_reused, 0
            quiet_s = time.monotonic() - self._last_token_s if self._unfinished else 0.0
            return Progress(
                samples,
                self._unfinished,
                self._tokens_generated,
                self._tokens_held,
                quiet_s,
                reused,
            )

    def counts(self) -> tuple[int, int]:
        """Number of requests in the engine, and of response tokens since its start."""
        with self._changed:
            return self._unfinished, self._tokens_generated

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps. Raises RuntimeError: the thread
        has stopped."""
        result: Future[T] = Future()
        self._calls.put((function, result))
        while True:
            try:
                return result.result(timeout=1.0)
            except TimeoutError:
                if result.done():
                    raise
                if not self._thread.is_alive():
                    raise RuntimeError("the engine's thread has stopped") from self._failure

    def rpc(self, method: str | Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a method of every vLLM worker of this engine; one result per worker."""
        return self.call(lambda: self._engine.collective_rpc(method, kwargs=arguments))

    def engine_call(self, function: Callable[[Any], T]) -> T:
        """Call a function with vLLM's ``LLMEngine``, in its thread."""
        return self.call(lambda: function(self._engine))

    def renew(self, version: int) -> None:
        """Set the weights version of requests from now on. Runs in the engine's thread."""
        self.weights_version = version
        if self._spec.adapters is not None:
            from vllm.lora.request import LoRARequest

            from rlmath.engines.transports.adapter_engine import ADAPTER_ID

            # vLLM includes the name in a prefix's hash, so keys and values of another version are
            # never reused; with keeps_kv, the salt separates them. vLLM reads the path if it has
            # lost the adapters, and finds nothing there.
            name = "adapters" if self._spec.keeps_kv else f"weights version {version}"
            self._adapters = LoRARequest(name, ADAPTER_ID, f"/dev/null/{name}")

    def drain(self) -> None:
        """Wait for running steps; afterwards the engine has no requests and runs nothing. Raises
        RuntimeError: it has unfinished requests, or the thread has stopped."""

        def idle() -> None:
            if self._running:
                raise RuntimeError(f"{len(self._running)} requests are unfinished")
            self._drain()

        self.call(idle)

    def stop(self) -> None:
        """Stop the thread and the engine with its workers. May be called twice."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    # The following methods run in the thread.

    def _run(self) -> None:
        try:
            while self._serve_calls(block=not self._running):
                if self._running:
                    self._step()
        except BaseException as error:
            traceback.print_exception(error)
            with self._changed:
                self._failure = _plain(error)
                self._changed.notify_all()
        finally:
            if self._engine is not None:
                self._engine.engine_core.shutdown()

    def _serve_calls(self, block: bool) -> bool:
        """Run requested calls; with ``block`` wait for one. Returns False at the end."""
        while True:
            try:
                item = self._calls.get(block)
            except queue.Empty:
                return True
            if item is None:
                return False
            function, result = item
            try:
                result.set_result(function())
            except BaseException as error:
                traceback.print_exception(error)
                result.set_exception(_plain(error))
            block = False

    def _make_engine(self) -> None:
        spec = self._spec
        require_plugin()
        with paused_collector():
            with _quickly(spec.device):
                from vllm.v1.engine.llm_engine import LLMEngine

                from rlmath.engines.engine_arguments import vllm_arguments

                self._engine = LLMEngine.from_engine_args(vllm_arguments(spec))
            self._ask_workers(spec)
            self._tokenizer = self._engine.get_tokenizer()
            self._engine.set_weight_version(str(self.weights_version))

    def _ask_workers(self, spec: EngineSpec) -> None:
        """Check how the workers applied the settings, and get the size of their KV cache."""
        check_workers(self._engine.collective_rpc(worker_precision), spec.precision, spec.dtype)
        if spec.device_ids:
            assigned = self._engine.vllm_config.parallel_config.assigned_physical_gpu_ids
            check_gpus(self._engine.collective_rpc(worker_gpu), assigned, spec.device_ids)
            self._engine.collective_rpc(bind_worker_to_gpu)
        self.kv_cache_bytes = spec.kv_cache_bytes or smallest(
            self._engine.collective_rpc(worker_kv_cache_bytes)
        )
        if spec.device == "cpu" and spec.tensor_parallel > 1:
            self._engine.collective_rpc(unlink_worker_segments)

    def _add(self, generation: int, requests: Sequence[Request]) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if generation < self._generation:
            return
        if generation > self._generation:
            self._drop_all(generation)
        longest = self._spec.max_sequence_tokens
        for request in requests:
            total = len(request.prompt_token_ids) + request.max_tokens
            if total > longest:
                raise ValueError(
                    f"{request.problem_id}: prompt {len(request.prompt_token_ids)} + response "
                    f"{request.max_tokens} = {total} tokens, more than the engine's {longest}"
                )
        tasks = self._engine.get_supported_tasks()
        for request in requests:
            request_id = str(self._num_submitted)
            self._num_submitted += 1
            running = RunningRequest.of(request, self._tokenizer)
            params = SamplingParams(
                max_tokens=request.new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=None if request.scores else self._seed(request),
                ignore_eos=request.ignore_eos,
                logprobs=None if request.scores else 0,
                prompt_logprobs=0 if request.scores else None,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                routed_experts_prompt_start=request.begun_routes,
                # Not shared with other requests. vLLM's deep copy takes as long as the rest of
                # adding a request.
                skip_clone=True,
            )
            core_request = self._engine.input_processor.process_inputs(
                request_id,
                {
                    "type": "token",
                    "prompt_token_ids": [*request.prompt_token_ids, *running.token_ids],
                    **self._salt(running),
                },
                params,
                supported_tasks=tasks,
                lora_request=self._adapters,
            )
            # The prompt that vLLM received, which may differ from the one sent.
            read = core_request.prompt_token_ids or ()
            running.prompt_digest = prompt_digest(read[: len(read) - request.begun_tokens])
            self._engine.engine_core.add_request(core_request)
            self._running[request_id] = running
        with self._changed:
            if self._unfinished == 0:
                self._last_token_s = time.monotonic()
            self._unfinished = len(self._running)
            self._tokens_held += sum(
                len(request.prompt_token_ids) + request.begun_tokens for request in requests
            )
        if generation == self._cut_generation:
            self._cut_running()

    def _cut(self, generation: int) -> None:
        if generation < self._generation:
            return
        if generation > self._generation:
            self._drop_all(generation)
        self._cut_generation = generation
        self._cut_running()

    def _cut_running(self) -> None:
        """Cut all running requests. A token being sampled is lost, and sampled again later."""
        self._engine.engine_core.abort_requests(list(self._running))
        self._decoded.flush()
        cut = [self._sample(running, "length") for running in self._running.values()]
        self._running.clear()
        self._drain()
        with self._changed:
            self._finished += cut
            self._unfinished = 0
            self._tokens_held = 0
            self._changed.notify_all()

    def _salt(self, running: RunningRequest) -> dict[str, str]:
        """Salt of the KV blocks, which separates equal tokens where blocks outlive weights.

        It is the version that sampled the first token. A response can therefore reuse its own
        blocks, and a new one only blocks of the active weights.
        """
        if not self._spec.keeps_kv:
            return {}
        version = running.spans[0][0] if running.spans else self.weights_version
        return {"cache_salt": str(version)}

    def _seed(self, request: Request) -> int:
        """A seed that continues a sample's random stream after the tokens that the model sampled.

        On CUDA a token's noise depends on the seed and the token's position, in vLLM's second model
        runner; in the first one a generator would start again.
        """
        if not request.begun_tokens:
            return request.seed
        if self._spec.device == "cpu":
            assert request.begun is not None
            return skip(request.seed, request.begun.model_tokens)
        if not self._engine.vllm_config.use_v2_model_runner:
            raise RuntimeError(
                f"{request.problem_id}, sample {request.index}: it cannot be continued, as vLLM's "
                "first model runner would repeat its random numbers; use "
                "rollout.schedule=synchronous, or unset VLLM_USE_V2_MODEL_RUNNER"
            )
        return request.seed

    def _drop_all(self, generation: int) -> None:
        """Start a generation with an empty engine."""
        self._engine.engine_core.abort_requests(list(self._running))
        self._running.clear()
        self._decoded.clear()
        self._drain()
        with self._changed:
            self._generation = generation
            self._unfinished = 0
            self._tokens_held = 0
            self._finished = []
            self._changed.notify_all()

    def _drain(self) -> None:
        """Wait for steps in flight; the engine has no requests, so their output is discarded."""
        client = self._engine.engine_core
        while client.engine_core.batch_queue:
            client.get_output()

    def _step(self) -> None:
        """Run one step of all running sequences.

        Tokens and log-probs are read from the engine's core as arrays, those of sequences that
        surely continue for all of them at once (``patches/short_steps.py``). vLLM's own front end
        would create a text and an object for every token, a tenth of a small model's time.
        """
        ended: list[tuple[str, str]] = []
        aborted: list[str] = []
        tokens = reused = 0
        outputs = self._engine.engine_core.get_output()
        # vLLM's label of the weights in this step, which may differ from the active ones.
        version = int(outputs.weight_version or 0)
        decoded = getattr(outputs, "decoded", None)
        if decoded is not None:
            tokens += decoded.tokens.size
            self._decoded.add(decoded, version, self._running)
            aborted += self._decoded.ended_turns()
            ended += [(request_id, "stop") for request_id in aborted]
        if outputs.outputs:
            self._decoded.flush()
        for output in outputs.outputs:
            running = self._running[output.request_id]
            tokens += len(output.new_token_ids)
            reused += running.take(output, version)
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if running.ends_turn(output.new_token_ids):
                if reason is None:
                    aborted.append(output.request_id)
                reason = "stop"
            if reason is not None:
                ended.append((output.request_id, reason))
        of_ended = [(self._running.pop(request_id), reason) for request_id, reason in ended]
        finished = [self._sample(running, reason) for running, reason in of_ended]
        dropped = sum(
            len(running.request.prompt_token_ids) + len(running.token_ids)
            for running, _ in of_ended
        )
        self._engine.engine_core.abort_requests(aborted)
        if finished and not self._running:
            self._drain()
        with self._changed:
            self._tokens_held += tokens - dropped
            self._tokens_reused += reused
            if tokens:
                self._tokens_generated += tokens
                self._last_token_s = time.monotonic()
            if finished:
                self._finished += finished
                self._unfinished = len(self._running)
                self._changed.notify_all()

    def _sample(self, running: RunningRequest, finish_reason: str) -> Sample:
        request = running.request
        if request.scores:
            return scored_sample(
                request, running.prompt_log_probs, self.weights_version, self._index
            )
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"{request.problem_id}, sample {request.index}: vLLM ended it with "
                f"'{finish_reason}' after {len(running.token_ids)} tokens"
            )
        if len(running.token_ids) != len(running.log_probs):
            raise RuntimeError(
                f"{request.problem_id}, sample {request.index}: vLLM returned "
                f"{len(running.token_ids)} tokens and {len(running.log_probs)} log-probabilities"
            )
        begun = None if request.begun is None else request.begun.prompt_digest
        if begun not in (None, running.prompt_digest):
            raise RuntimeError(
                f"{request.problem_id}, sample {request.index}: it was begun after another prompt "
                f"(CRC-32 {begun:08x}) than it is continued after ({running.prompt_digest:08x})"
            )
        reason: FinishReason = "length" if finish_reason == "length" else "stop"
        if reason == "length" and len(running.token_ids) < request.max_tokens:
            reason = "cut"
        return Sample(
            problem_id=request.problem_id,
            index=request.index,
            token_ids=np.array(running.token_ids, np.int32),
            log_probs=np.array(running.log_probs, np.float32),
            # The text of an unfinished sample is not used.
            text=""
            if reason == "cut"
            else self._tokenizer.decode(running.token_ids.tolist(), skip_special_tokens=True),
            finish_reason=reason,
            spans=tuple(running.spans) or ((self.weights_version, 0),),
            seed=request.seed,
            engine=self._index,
            routes=self._routes(running, is_cut=reason == "cut"),
            prompt_digest=running.prompt_digest,
            segments=ONE_TURN if request.begun is None else request.begun.segments,
            calls=() if request.begun is None else request.begun.calls,
        )

    def _routes(self, running: RunningRequest, *, is_cut: bool) -> Any:
        request, spec = running.request, self._spec.routes
        begun = None if request.begun is None else request.begun.routes
        if spec is None or not request.wants_routes:
            return begun
        tokens = len(request.prompt_token_ids) + len(running.token_ids)
        found = spec.assemble(begun, running.routes, tokens)
        if found is None and request.begun is None and not is_cut and not self._told_of_rows:
            self._told_of_rows = True
            print(
                f"warning: {request.problem_id}, sample {request.index}: vLLM returned routes "
                f"for {sum(map(len, running.routes))} tokens, but {tokens - 1} went through the "
                "model (all of prompt and response except the last). This sample has no routes, "
                "and neither has any other sample of this engine with such a difference",
                file=sys.stderr,
                flush=True,
            )
        return found


def scored_sample(
    request: Request, prompt_log_probs: Any, weights_version: int, engine: int
) -> Sample:
    """The sample of a scoring request, with the log-probs of its tokens.

    Args:
        prompt_log_probs: Float32 log-probs of each read token except the first; ``None``: vLLM
            returned none.

    Raises:
            RuntimeError: A token has no log-prob.
    """
    begun = request.begun
    assert begun is not None
    prompt = len(request.prompt_token_ids)
    wanted = prompt + len(begun.token_ids) - 1
    found = 0 if prompt_log_probs is None else len(prompt_log_probs)
    if found != wanted:
        raise RuntimeError(
            f"{request.problem_id}, sample {request.index}: vLLM returned {found} "
            f"log-probabilities for {wanted} tokens to score"
        )
    return Sample(
        problem_id=request.problem_id,
        index=request.index,
        token_ids=begun.token_ids,
        # Token i is at index i - 1. A copy, to release the prompt's memory.
        log_probs=prompt_log_probs[prompt - 1 :].copy(),
        text="",
        finish_reason="stop",
        spans=((weights_version, 0),),
        seed=request.seed,
        engine=engine,
    )


def _plain(error: BaseException) -> BaseException:
    """Convert an error to a built-in type: its receiver must not need to import vLLM.

    The traceback is in the engine's log.
    """
    if type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
