"""Devices: the only place that knows whether there is CUDA.

Other code asks a :class:`Platform` for its collective backend, its torch device and the kind of
layers that Megatron builds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from rlmath.device import peak_memory
from rlmath.device.freed_memory import return_freed_memory
from rlmath.device.host_memory import pinned_buffer
from rlmath.device.numa import bind_to_gpu
from rlmath.device.streams import CudaSideStream, SideStream
from rlmath.errors import UserError
from rlmath.utils import nvidia_driver
from rlmath.utils import transformer_engine as te_install
from rlmath.utils.node_cache import node_cache


@dataclass(frozen=True)
class LinkProbe:
    """Measurement of the links between ranks at the start, and the rates expected."""

    num_bytes: int  # Size of the all-reduce.
    least_within_node: float  # GB/s below which the user is warned; likewise least_between_nodes.
    least_between_nodes: float
    cause_within_node: str  # The usual cause of a low rate; likewise cause_between_nodes.
    cause_between_nodes: str


# H100 and A100 with NVLink reach 150 to 450 GB/s and PCIe 10 to 25; one 400 Gb/s InfiniBand port a
# GPU reaches 40, and TCP over the host's Ethernet 1 to 5.
_NCCL_LINKS = LinkProbe(
    num_bytes=256 * 2**20,
    least_within_node=50.0,
    least_between_nodes=8.0,
    cause_within_node=(
        "GPUs without NVLink, or NCCL kept from peer access (NCCL_P2P_DISABLE, PCIe ACS, a "
        "container with a small /dev/shm); see nvidia-smi topo -m and NCCL_DEBUG=INFO"
    ),
    cause_between_nodes=(
        "NCCL uses TCP instead of InfiniBand: libibverbs or /dev/infiniband is missing in the "
        "container, or its memlock limit is too low; NCCL_DEBUG=INFO says NET/Socket then"
    ),
)
# Loopback reaches 0.3 to 2 GB/s; a tenth of that means that the host is busy.
_GLOO_LINKS = LinkProbe(
    num_bytes=2**20,
    least_within_node=0.01,
    least_between_nodes=0.01,
    cause_within_node="more busy processes than cores",
    cause_between_nodes="a slow network interface (GLOO_SOCKET_IFNAME names gloo's)",
)


@dataclass(frozen=True)
class Platform:
    """The kind of device that a process computes on."""

    name: Literal["cpu", "cuda"]
    collective_backend: Literal["gloo", "nccl"]
    # Megatron layers: Transformer Engine's, or Megatron's own (local).
    layer_spec: Literal["local", "transformer_engine"]

    @property
    def torch_device(self) -> torch.device:
        """The device of this process; on CUDA the one that ``prepare_megatron_process`` chose."""
        if self.name == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def link_probe(self) -> LinkProbe:
        """The probe for links between this platform's ranks."""
        return _GLOO_LINKS if self.collective_backend == "gloo" else _NCCL_LINKS

    @property
    def collective_timeout_s(self) -> float:
        """Time that a rank waits for the others in a collective; on CPU they may be computing."""
        return 1800.0 if self.collective_backend == "gloo" else 600.0

    def batches_context_messages(self, context_parallel: int) -> bool:
        """Whether Transformer Engine's ring of context ranks sends and receives in one call
        (``AttnFuncWithCPAndKVP2P`` of 2.11)."""
        if self.name == "cuda" and torch.cuda.get_device_capability() >= (10, 0):
            return False
        return context_parallel == 2

    @property
    def runs_triton(self) -> bool:
        """Whether Triton's kernels run on this device: a GPU (a dry run has none), with Triton."""
        return self.collective_backend == "nccl" and find_spec("triton") is not None

    def prepare_megatron_process(self, local_rank: int, num_threads: int | None) -> None:
        """Prepare this process to host Megatron; call before importing ``megatron``.

        Variables that CUDA and NCCL read must be set before torch starts them, so they are not set
        here: see :func:`rlmath.device.environment.rank_environment`. Raises UserError: Transformer
        Engine's layers are requested, and importing it fails.

        Args:
            local_rank: Index of the rank's accelerator among the process's visible ones (CUDA).
            num_threads: Threads of one CPU operator; ``None``: on CUDA the process's share of the
                cores beside its GPU, to which it is bound.
        """
        if self.name == "cuda":
            os.environ.setdefault("TRITON_CACHE_DIR", str(node_cache() / "ranks_triton"))
            torch.cuda.set_device(local_rank)
            share = bind_to_gpu(local_rank)
            torch.set_num_threads(num_threads or share)
            error = te_install.import_error()
            if error is not None and self.layer_spec == "transformer_engine":
                raise UserError(te_install.refusal(error))
            if error is not None:
                te_install.hide()
            return
        from rlmath.device.cpu_shim import install
        from rlmath.device.gloo import share_device

        install()
        share_device()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def prepare_driver(self) -> None:
        """Prepare this process to drive a run beside its ranks and engines."""
        if self.name == "cpu":
            # The ranks use the cores, and a second thread would spin on one between its shares.
            torch.set_num_threads(1)

    def synchronize(self) -> None:
        """Wait for queued work, so that a clock read next measures it."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    def side_stream(self) -> SideStream:
        """A queue of work beside the caller's; see ``rlmath.device.streams``."""
        return CudaSideStream() if self.name == "cuda" else SideStream()

    def release_cached_memory(self) -> None:
        """Return memory that the allocator caches, for other processes on the same device.

        Engines on the same GPU can wake only in memory that this process does not hold.
        """
        if self.name == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """``[num_bytes]`` uint8 of host memory, page-locked where a GPU copies to it."""
        if self.name == "cuda":
            return pinned_buffer(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor in page-locked memory, so that copies to a GPU do not block the host; the
        same tensor on CPU."""
        return tensor.pin_memory() if self.name == "cuda" else tensor

    def reserved_bytes(self) -> int | None:
        """GPU memory reserved by this process's allocator; ``None`` on CPU, which has no count."""
        return torch.cuda.memory_reserved() if self.name == "cuda" else None

    def bytes_of_others(self) -> int | None:
        """GPU memory that is neither free nor this process's allocator's: other processes, such as
        a sleeping engine, and CUDA's own; ``None`` on CPU."""
        if self.name == "cpu":
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def memory_bytes(self) -> int | None:
        """Memory of the GPU; ``None`` on CPU."""
        return None if self.name == "cpu" else torch.cuda.mem_get_info()[1]

    def reset_peak_memory(self) -> None:
        """Restart the count of ``peak_memory_gib`` (CUDA; a CPU process's peak stays)."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_memory_gib(self) -> float:
        """Highest memory of this process in GiB: on CUDA allocated since the last reset or
        :meth:`take_peak_bytes`, on CPU resident since its start."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return peak_memory.highest_bytes() / 2**30

    def take_peak_bytes(self) -> int:
        """Highest memory since the last call: allocated on CUDA, resident on CPU."""
        if self.name != "cuda":
            return peak_memory.take_peak_bytes()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


CPU = Platform("cpu", "gloo", "local")


def cuda_visible() -> bool:
    """Whether this machine has an NVIDIA GPU that torch can use."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def choose_platform(device: str, layers: str = "auto", *, elsewhere: bool = False) -> Platform:
    """The platform of ``cluster.device``: ``auto`` looks at this machine.

    Only files and metadata of Transformer Engine are checked, which is fast enough for the driver;
    ``Platform.prepare_megatron_process`` imports it in the ranks' processes.

    Args:
        layers: ``actor.layers``, or ``any``: Transformer Engine's where there is one, for tools to
            which it does not matter, and for processes without an actor.
        elsewhere: For the driver of a run whose ranks and engines are on a Ray cluster, whose head
            may have no GPU: with ``cuda`` this machine is not checked.

    Raises:
        UserError: ``cuda`` was asked for and there is none, or Transformer Engine is wanted and
            missing or built in part.
    """
    if device == "cpu" or (device == "auto" and not cuda_visible()):
        if layers == "transformer_engine":
            raise UserError(
                "actor.layers=transformer_engine: its layers run on CUDA only; use auto or local"
            )
        return CPU
    if elsewhere and device == "cuda":
        return Platform("cuda", "nccl", "local" if layers == "local" else "transformer_engine")
    if not cuda_visible():
        raise UserError(
            f"cluster.device=cuda, but torch {torch.__version__} sees no CUDA device on this "
            f"machine: {nvidia_driver.why_no_device(torch.version.cuda)}. Or set "
            "cluster.device=cpu."
        )
    if layers == "local":
        return Platform("cuda", "nccl", "local")
    missing = te_install.missing_part()
    if missing is not None and layers == "any":
        return Platform("cuda", "nccl", "local")
    if missing is not None:
        raise UserError(te_install.refusal(missing))
    return Platform("cuda", "nccl", "transformer_engine")
