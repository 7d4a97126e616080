"""Process groups of the Megatron ranks."""

from __future__ import annotations

import gc
import random
import socket
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from rlmath.checkpoint.writer import background_group
from rlmath.device import Platform
from rlmath.device.gloo import use_interface_of
from rlmath.model.parallel import Layout

# Time for which ranks wait for one that reads or writes files. The model that took minutes from a
# slow disk may have been in the memory of the other nodes. Ray reports a rank that dies meanwhile.
DISK_TIMEOUT = timedelta(hours=2)


def initialize(
    layout: Layout,
    platform: Platform,
    rank: int,
    address: str,
    port: int,
    seed: int,
    timeout_s: float | None = None,
    node_address: str = "",
) -> None:
    """Join the other ranks and build Megatron's groups. Call once in each rank's process.

    Args:
        rank: This process's rank, ``0 <= rank < layout.world_size``.
        address: Host where rank 0 listens; ``port``: its port.
        seed: Seed of Megatron's, Python's and NumPy's random streams.
        timeout_s: Timeout of a collective; ``None``: the platform's.
        node_address: Address by which other nodes reach this one; empty: gloo resolves the host's
            name, which on Debian is often 127.0.1.1.
    """
    from megatron.core import parallel_state, tensor_parallel

    use_interface_of(node_address)
    timeout_s = timeout_s or platform.collective_timeout_s
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        platform.collective_backend,
        store=_store(rank, layout.world_size, address, port, timeout),
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_stages if layout.virtual_stages > 1 else None
        ),
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        # Checkpoints have their own gloo group, and nothing else uses Megatron's.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    # Nodes that cannot reach each other over gloo fail here instead of at the first checkpoint.
    background_group()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def wait_for_disks() -> None:
    """Let the ranks' gloo group wait longer from now on: it is where they meet when one of them has
    read or written files. NCCL's groups keep the timeout by which a rank that hangs is found."""
    background_group().set_timeout(DISK_TIMEOUT)


def _store(
    rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> dist.TCPStore:
    """Where the ranks meet; rank 0 serves it."""
    listening = None
    if rank == 0:
        # torch's own server listens on all interfaces, and anybody could write to it.
        listening = socket.create_server((address, port), backlog=4096).detach()
    return dist.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
    )


def destroy() -> None:
    """Leave the groups; no-op without any."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # Models reference their groups in cycles, and a gloo group's threads end with its last
    # reference.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
