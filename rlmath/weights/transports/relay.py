"""On an engine's machine: buckets from Ray's object store into shared memory for vLLM's workers."""

from __future__ import annotations

from typing import Any

import torch

from rlmath.weights.transports.segments import NamedSegments, map_writable, open_segment


class Relay:
    """Segments that this process writes and the engine's workers read.

    Args:
        run_id: Part of the segments' names.
        sizes_bytes: Of each segment.

    Raises:
        UserError: There is not enough shared memory.
    """

    def __init__(self, run_id: str, sizes_bytes: list[int]) -> None:
        self._named = NamedSegments(run_id, sizes_bytes)
        self._segments = [map_writable(open_segment(name)) for name in self._named.names]

    @property
    def init_info(self) -> dict[str, Any]:
        """For the workers, as the ``shared_memory`` transport has it."""
        return {"segments": self._named.names}

    def all_have_opened(self) -> None:
        """The names are not needed any more; the memory goes with the last process."""
        self._named.unlink()

    def take(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Write a bucket into its segment.

        Returns:
            The message that the ``shared_memory`` transport has for it.
        """
        import ray

        message = dict(update_info)
        stored = torch.frombuffer(memoryview(ray.get(message.pop("stored"))), dtype=torch.uint8)
        self._segments[message["segment"]][: stored.numel()].copy_(stored)
        return message
