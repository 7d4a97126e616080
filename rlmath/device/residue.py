"""GPU memory that processes keep while others take their turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.errors import UserError

_GIB = 2**30


@dataclass(frozen=True)
class Residue:
    """Memory of a Megatron rank after it has made room for engines."""

    # Bytes that the rank keeps on its device: on CUDA its allocator's and its communicators', on
    # CPU its models' storages.
    device_bytes: int
    host_bytes: int  # Bytes of copies in host memory.
    others_bytes: int | None  # Bytes of the GPU that others use; None on CPU.
    # Bytes that the rank held in addition during the step's update, beside the same others.
    spare_bytes: int = 0
    communicator_bytes: int = 0  # NCCL's part of device_bytes, which offloading cannot free.
    gpu_bytes: int | None = None  # Memory of the GPU; None on CPU.


def check_engine_room(ranks: Sequence[Residue], share: float) -> None:
    """Compare the GPU memory that ranks leave with the engines' share, before engines start. Raises
    UserError: a GPU has too little; the message gives sizes on the fullest and a share that fits.
    ``ranks``: in order of rank. ``share``: ``rollout.gpu_memory_utilization``."""
    counted = [
        (one.device_bytes + one.others_bytes, number, one, one.gpu_bytes)
        for number, one in enumerate(ranks)
        if one.gpu_bytes is not None and one.others_bytes is not None
    ]
    if not counted:
        return
    taken, number, rank, gpu = max(counted, key=lambda one: one[0] / one[3])
    if taken + share * gpu <= gpu:
        return
    own = rank.device_bytes - rank.communicator_bytes
    fits = math.floor(100 * (1 - taken / gpu)) / 100
    raise UserError(
        f"rank {number}'s GPU has no room for an engine: the rank keeps {own / _GIB:.1f} GiB, "
        f"NCCL's communicators {rank.communicator_bytes / _GIB:.1f}, CUDA and other processes "
        f"{(taken - rank.device_bytes) / _GIB:.1f}, and rollout.gpu_memory_utilization={share:g} "
        f"asks for {share * gpu / _GIB:.1f} of {gpu / _GIB:.1f}; set it to {max(0.0, fits):g} or "
        "less, or let the optimizer leave the GPU (actor.offload=optimizer)"
    )
