"""The Ray actor that hosts one vLLM engine.

The pool asks it for samples; the trainer's rank 0 asks it, through the four methods of vLLM's
weight transfer protocol, to take new weights. Nothing of vLLM or torch is imported before
``start``, so the process's environment can be set first.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.cluster.logs import send_output_to
from rlmath.cluster.processes import ProcessPlace, own_place
from rlmath.cluster.watchdog import write_stacks_on_signal
from rlmath.engines.engine_arguments import cache_archive, cache_folder
from rlmath.engines.engine_workers import cache_tokens, cached_blocks, gpu_uuid
from rlmath.engines.protocol import Engine
from rlmath.engines.requests import EngineSpec, Progress, Request
from rlmath.engines.step_loop import StepLoop, import_vllm
from rlmath.errors import WeightsError
from rlmath.plugins import loading
from rlmath.utils.child_processes import end_with_parent
from rlmath.utils.node_cache import save

if TYPE_CHECKING:
    from rlmath.engines.layer_values import Noted
    from rlmath.weights.slices import WeightSlice


class RolloutEngine(Engine):
    """A vLLM engine, which ``RolloutPool`` starts in a separate process."""

    def __init__(self, spec: EngineSpec, index: int, environment: dict[str, str]) -> None:
        end_with_parent(os.getppid())
        os.environ.update(environment)
        # vLLM's workers are processes that it spawns.
        os.environ.update(loading.environment())
        # FlashInfer calls ninja, and must find it even if this environment is not activated.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        # Held as long as the process lives.
        self._cache = cache_folder(spec, index) if spec.device == "cuda" else None
        self._spec = spec
        self._index = index
        self._loop = StepLoop(spec, index)
        # False before they are sent or read, from the start of an update until its end, and after a
        # sleep that dropped them.
        self._weights_valid = spec.reads_weights
        self._preparing = threading.Lock()
        self._prepared = False

    def prepare(self) -> None:
        """Import what ``start`` needs; it touches no GPU, so others may load there meanwhile."""
        with self._preparing:
            if self._prepared:
                return
            send_output_to(self._spec.log_path(self._index))
            write_stacks_on_signal()
            import_vllm(self._spec.device)
            self._prepared = True

    def start(self) -> int | None:
        """Load the model; returns when the engine can sample. Returns bytes of each rank's KV
        cache; ``None`` where vLLM does not measure it (CPU). Raises Exception: whatever vLLM says
        about settings, model or memory."""
        self.prepare()
        self._loop.start()
        if self._cache is not None and self._index == 0:
            save(self._cache[0], cache_archive(self._spec))
        return self._loop.kv_cache_bytes

    def place(self) -> ProcessPlace:
        """The place of the actor's process; its workers are its children."""
        return own_place()

    def exchange(self, generation: int, requests: Sequence[Request], timeout_s: float) -> Progress:
        """Take new requests; give the samples that finished since the last call.

        Waits until there is one, the engine has no work, or ``timeout_s`` has passed. Raises
        ValueError: a request is longer than the engine's longest sequence; RuntimeError: the engine
        has no valid weights, or has failed.

        Args:
            generation: Number of the pool's ``generate``. A higher one than before drops what the
                engine still has; calls with a lower one come too late and do nothing.
            timeout_s: Longest wait.
        """
        if requests and not self._weights_valid:
            raise RuntimeError(
                f"engine {self._index} has no valid weights: the last weight sync did not "
                "finish, or it has slept since; send the weights first"
            )
        if requests:
            self._loop.submit(generation, requests)
        return self._loop.progress(generation, timeout_s)

    def abort(self, generation: int) -> None:
        """Drop all requests of this generation, and its samples that were not yet fetched."""
        self._loop.submit(generation + 1, [])

    def cut(self, generation: int) -> None:
        """End all requests of this generation with the tokens they have, late ones included.

        ``exchange`` gives them as samples that are ``cut``.
        """
        self._loop.cut(generation)

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU that the actor shares.

        The weights are dropped, not kept: an update has to follow before the next request. Where
        updates bring adapters alone, the base model is kept in host memory. Raises RuntimeError:
        the engine has requests, or was not made to sleep (``sleeps``).
        """
        self._refuse_unless_idle("sleep")
        if not self._spec.sleeps:
            raise RuntimeError(f"engine {self._index} cannot sleep (EngineSpec.sleeps=False)")
        self._weights_valid = False
        level = 2 if self._spec.adapters is None else 1
        self._loop.engine_call(lambda engine: engine.sleep(level=level))

    def wake(self, part: str) -> None:
        """Take GPU memory for ``weights`` (before an update) or ``kv_cache`` (after it)."""
        self._loop.engine_call(lambda engine: engine.wake_up(tags=[part]))

    # vLLM's weight transfer protocol (``VLLMWeightSyncClient``), called by the trainer.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer; each transport defines its ``init_info``."""
        # vLLM's transports overwrite an earlier connection and would leak its communicator.
        self._loop.rpc("shutdown_weight_transfer_engine")
        self._loop.rpc("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Make ready for new weights. The engine must have no requests. Raises RuntimeError: it has
        some, whose samples would be of two versions."""
        self._refuse_unless_idle("take new weights")
        self._weights_valid = False
        self._loop.rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._loop.rpc("update_weights", update_info=update_info)

    def finish_weight_update(self, version: int) -> None:
        """Activate the new weights and drop what the old ones left in caches.

        Keys and values cached under the old weights would be reused with the new ones, and give
        log-probabilities of neither. With ``EngineSpec.keeps_kv`` they stay for responses that
        began under them; the names of their blocks contain the version.

        Raises:
            RuntimeError: The prefix cache could not be reset.
            WeightsError: Tensors were not sent. A new attempt would not send them either.
        """
        from rlmath.engines.transports.engine_parts import UNSENT

        try:
            if self._spec.adapters is None:
                self._loop.rpc("finish_weight_update")
            else:
                from rlmath.engines.transports.adapter_engine import finish_with_adapters

                self._loop.rpc(finish_with_adapters)
        except Exception as error:
            _, begin, missing = str(error).partition(UNSENT)
            if not begin:
                raise
            raise WeightsError(f"engine {self._index}: {begin}{missing}") from None

        def renew(engine: Any) -> None:
            # The same version was sent again: blocks with its name are of other weights.
            keeps = self._spec.keeps_kv and version != self._loop.weights_version
            if not keeps and not engine.reset_prefix_cache():
                raise RuntimeError(
                    f"engine {self._index}: the prefix cache still holds blocks of weights version "
                    f"{self._loop.weights_version} after the update to version {version}"
                )
            engine.set_weight_version(str(version))
            self._loop.renew(version)

        self._loop.engine_call(renew)
        self._weights_valid = True

    def weights_version(self) -> int:
        """Version of the current weights; 0 are those of the model folder."""
        return self._loop.weights_version

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int | None]:
        """Fingerprints of the current weights, by Hugging Face name.

        See ``rlmath.engines.transports.engine_fingerprints`` for what they cover on a CPU.
        ``part``: only this slice, and all adapters; ``None``: everything.
        """
        from rlmath.engines.transports.engine_fingerprints import (
            engine_fingerprints,
            worker_fingerprints,
        )

        held = engine_fingerprints(self._loop.rpc(worker_fingerprints, part=part))
        if self._spec.adapters is not None:
            from rlmath.engines.transports.adapter_engine import adapter_fingerprints

            held |= engine_fingerprints(self._loop.rpc(adapter_fingerprints))
        return held

    def constants(self) -> list[dict[str, Any]]:
        from rlmath.engines.worker_state import worker_constants

        return self._loop.rpc(worker_constants)

    def parameter_sums(self) -> list[dict[str, int]]:
        """A checksum of each worker's parameters. A CPU's packed matrices are not included."""
        from rlmath.engines.worker_state import parameter_sums

        return self._loop.rpc(parameter_sums)

    def layer_values(self, tokens: list[int]) -> list[Noted] | None:
        from rlmath.engines.layer_values import Reading, noted_values, watch

        self._loop.rpc(watch)
        try:
            was_read = self._loop.engine_call(Reading(tokens))
        finally:
            noted = self._loop.rpc(noted_values)
        return noted if was_read else None

    def cached_blocks(self) -> int:
        """Blocks of prompts' keys and values that are kept for other requests."""
        return self._loop.engine_call(cached_blocks)

    def kv_cache_tokens(self) -> int:
        return self._loop.engine_call(cache_tokens)

    def gpus(self) -> list[str]:
        return self._loop.rpc(gpu_uuid)

    def begin_profile(self, name: str) -> None:
        """Record the next steps; see ``Engine.begin_profile``."""
        prefix = f"{name}_{self._spec.role}_{self._index}"
        self._loop.engine_call(lambda engine: engine.start_profile(prefix))

    def end_profile(self) -> None:
        """Stop recording, and write the trace."""
        self._loop.engine_call(lambda engine: engine.stop_profile())

    def call_engine(self, function: Callable[[Any], Any]) -> Any:
        """``function(engine)`` with vLLM's ``LLMEngine``, between two steps; for tests and
        drills."""
        return self._loop.engine_call(function)

    def call_workers(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function(worker)`` in each of vLLM's workers: for tests and drills."""
        return self._loop.rpc(function)

    def shutdown(self) -> None:
        """End the engine and its workers. The actor can do nothing afterwards."""
        self._loop.stop()

    def _refuse_unless_idle(self, purpose: str) -> None:
        unfinished, _ = self._loop.counts()
        if unfinished:
            raise RuntimeError(
                f"engine {self._index} cannot {purpose} with {unfinished} unfinished requests; "
                "take their samples or abort them first"
            )
        self._loop.drain()
