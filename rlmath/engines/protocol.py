"""What is asked of an engine. ``RolloutEngine`` has vLLM do it; no other folder knows vLLM."""

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
        """Load the model; returns when the engine can sample: bytes of each rank's KV cache."""
        ...

    def exchange(self, generation: int, requests: Sequence[Request], timeout_s: float) -> Progress:
        """Generate: take new requests, and give the samples that finished since the last call."""
        ...

    def abort(self, generation: int) -> None:
        """Drop all requests of this generation."""
        ...

    def cut(self, generation: int) -> None:
        """End all requests of this generation where they are, as samples that are ``cut``."""
        ...

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU."""
        ...

    def wake(self, part: str) -> None:
        """Take memory for ``weights`` (before an update) or ``kv_cache`` (after it)."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer; ``init_info`` is the transport's own."""
        ...

    def start_weight_update(self) -> None:
        """Make ready for new weights; there are no requests."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket of weights."""
        ...

    def finish_weight_update(self, version: int) -> None:
        """Put the new weights in force, and forget what the old ones left in caches."""
        ...

    def weights_version(self) -> int:
        """Version of the weights in force; 0 are those of the model folder."""
        ...

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int | None]:
        """Fingerprints of the weights in force, or of a slice, by Hugging Face name."""
        ...

    def constants(self) -> list[dict[str, Any]]:
        """Of each worker, what it computes with beside weights: ``norm_eps``, the epsilons of its
        norms, and ``ropes``, its rotary embeddings, each with ``dtype``, ``position`` and the
        ``values`` there, cosines before sines, as they are scaled."""
        ...

    def parameter_sums(self) -> list[dict[str, int]]:
        """Of each worker: a checksum of each parameter."""
        ...

    def layer_values(self, tokens: list[int]) -> list[Noted] | None:
        """Of each worker, what its layers give for a sequence; ``None``: the engine has requests,
        whose tokens would be among these."""
        ...

    def cached_blocks(self) -> int:
        """Blocks of prompts' keys and values that are kept for other requests."""
        ...

    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        ...

    def gpus(self) -> list[str]:
        """UUID of each worker's GPU."""
        ...

    def shutdown(self) -> None:
        """End the engine and its workers."""
        ...
