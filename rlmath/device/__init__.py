"""The one place that knows that there may be no CUDA.

Everything else asks a :class:`Platform` for its collective backend, its torch device and the kind
of layers that Megatron should build.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from rlmath.errors import UserError


@dataclass(frozen=True)
class Platform:
    """What a process computes on.

    Attributes:
        name: ``cpu`` or ``cuda``.
        collective_backend: Backend of ``torch.distributed``.
        layer_spec: Megatron layers: Transformer Engine's, or Megatron's own (``local``).
    """

    name: Literal["cpu", "cuda"]
    collective_backend: Literal["gloo", "nccl"]
    layer_spec: Literal["local", "transformer_engine"]

    @property
    def torch_device(self) -> torch.device:
        """The device of this process; on CUDA the one that ``prepare_megatron_process`` chose."""
        if self.name == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def prepare_megatron_process(self, local_rank: int, num_threads: int) -> None:
        """Make this process fit to host Megatron; call before importing ``megatron``.

        Args:
            local_rank: Which of the process's visible accelerators it takes (CUDA only).
            num_threads: Threads of one CPU operator (CPU only).
        """
        if self.name == "cuda":
            torch.cuda.set_device(local_rank)
            # One hardware queue keeps Megatron's overlapped collectives in the order in which
            # they were issued, which its tensor-parallel overlap relies on.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            return
        from rlmath.device.cpu_shim import install
        from rlmath.device.gloo import share_device

        install()
        share_device()
        torch.set_num_threads(num_threads)

    def prepare_driver(self) -> None:
        """Make this process fit to drive a run beside its ranks and engines."""
        if self.name == "cpu":
            # They have the cores, and a second thread would spin on one between its shares.
            torch.set_num_threads(1)

    def synchronize(self) -> None:
        """Wait for queued work, so that a clock read next measures it."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    def release_cached_memory(self) -> None:
        """Give what the allocator keeps for later back, for other processes on the same GPU.

        An engine that shares it wakes up in what the actor's process does not hold.
        """
        if self.name == "cuda":
            torch.cuda.empty_cache()

    def peak_memory_gib(self) -> float:
        """Highest memory of this process so far: allocated on CUDA, resident on CPU, in GiB."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


CPU = Platform("cpu", "gloo", "local")


def cuda_visible() -> bool:
    """Whether this machine has an NVIDIA GPU that torch can use."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def choose_platform(device: str) -> Platform:
    """The platform of ``cluster.device``: ``auto`` looks at this machine.

    Raises:
        UserError: ``cuda`` was asked for and there is none.
    """
    if device == "cpu" or (device == "auto" and not cuda_visible()):
        return CPU
    if not cuda_visible():
        raise UserError(
            f"cluster.device=cuda, but torch {torch.__version__} sees no CUDA device on this "
            "machine; set cluster.device=cpu, or install the CUDA build and check nvidia-smi."
        )
    return Platform("cuda", "nccl", "transformer_engine" if _has_transformer_engine() else "local")


def _has_transformer_engine() -> bool:
    from importlib.util import find_spec

    return find_spec("transformer_engine") is not None
