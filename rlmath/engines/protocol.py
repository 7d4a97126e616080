"""Interface of engines. ``RolloutEngine`` implements it with vLLM; no other folder knows vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlmath.engines.requests import Progress, Request

if TYPE_CHECKING:
    from rlmath.engines.layer_values import Noted
    from rlmath.weights.slices import WeightSlice


class Engine(Protocol):
    """One engine, in its own process. Each method may be called from any thread."""

    def start(self) -> int | None:
        """Load the model, and return bytes of each rank's KV cache when the engine can sample."""
        ...

    def exchange(self, generation: int, requests: Sequence[Request], timeout_s: float) -> Progress:
        """Take new requests, and return the samples that finished since the last call."""
        ...

    def abort(self, generation: int) -> None:
        """Drop all requests of this generation."""
        ...

    def cut(self, generation: int) -> None:
        """Cut all requests of this generation where they are, as samples that are ``cut``."""
        ...

    def sleep(self) -> None:
        """Return the memory of weights and KV cache to the GPU."""
        ...

    def wake(self, part: str) -> None:
        """Take memory for ``weights`` (before an update) or ``kv_cache`` (after it)."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer; ``init_info`` is specific to the transport."""
        ...

    def start_weight_update(self) -> None:
        """Prepare for new weights, when there are no requests."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket of weights."""
        ...

    def finish_weight_update(self, version: int) -> None:
        """Activate the new weights, and clear caches of the old ones."""
        ...

    def weights_version(self) -> int:
        """Version of the current weights; 0 are those of the model folder."""
        ...

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int | None]:
        """Fingerprints of the current weights, or of a slice, by Hugging Face name."""
        ...

    def constants(self) -> list[dict[str, Any]]:
        """Each worker's constants beside weights: ``norm_eps``, the epsilons of its norms, and
        ``ropes``, its rotary embeddings, each with ``dtype``, ``position`` and the ``values``
        there, cosines before sines, after scaling."""
        ...

    def parameter_sums(self) -> list[dict[str, int]]:
        """A checksum of each parameter, for each worker."""
        ...

    def layer_values(self, tokens: list[int]) -> list[Noted] | None:
        """Each worker's layer values for a sequence; ``None``: the engine has requests, whose
        tokens would be among these."""
        ...

    def cached_blocks(self) -> int:
        """Number of blocks with prompts' keys and values kept for other requests."""
        ...

    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        ...

    def gpus(self) -> list[str]:
        """UUID of each worker's GPU."""
        ...

    def begin_profile(self, name: str) -> None:
        """Record the next steps as ``EngineSpec.profile`` says; traces begin with ``name``."""
        ...

    def end_profile(self) -> None:
        """Stop recording, and write the trace of each worker."""
        ...

    def shutdown(self) -> None:
        """End the engine and its workers."""
        ...
