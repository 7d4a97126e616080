"""What processes that take turns on a GPU keep of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Residue:
    """What is left of a Megatron rank after it has made room for engines.

    Attributes:
        device_bytes: That the rank keeps on its device: on CUDA what its allocator has, on CPU the
            storages of its models.
        host_bytes: Of copies in host memory.
        others_bytes: What else is taken of the GPU; ``None`` on CPU.
        spare_bytes: By which the rank had more in the step's update, beside the same others.
    """

    device_bytes: int
    host_bytes: int
    others_bytes: int | None
    spare_bytes: int = 0
