"""Process groups of the Megatron ranks."""

from __future__ import annotations

import gc
import random
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from rlmath.device import Platform


@dataclass(frozen=True)
class Layout:
    """How the actor's ranks share the model and the data. Ranks = tp x pp x cp x dp.

    Attributes:
        expert_parallel: Ranks of a stage that share the experts of an MoE, each of which is
            whole on its rank; a divisor of ``tensor_parallel * data_parallel``. With 1 each copy
            of the model has all experts, cut over its tensor ranks as other matrices are.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    context_parallel: int = field(default=1, kw_only=True)
    expert_parallel: int = field(default=1, kw_only=True)

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tensor_parallel if self.expert_parallel == 1 else 1

    @property
    def world_size(self) -> int:
        model = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        return model * self.data_parallel


def initialize(
    layout: Layout,
    platform: Platform,
    rank: int,
    address: str,
    port: int,
    seed: int,
    timeout_s: float = 1800.0,
) -> None:
    """Join the other ranks and build Megatron's groups. Call once in each rank's process.

    Args:
        rank: This process's rank, ``0 <= rank < layout.world_size``.
        address: Host where rank 0 listens; port: where.
        seed: Of Megatron's random streams, Python's and NumPy's.
        timeout_s: How long a collective may wait for the others.
    """
    from megatron.core import parallel_state, tensor_parallel

    timeout = timedelta(seconds=timeout_s)
    listening = None
    if rank == 0:
        # torch's own listens on all interfaces, and anybody may write to it.
        listening = socket.create_server((address, port), backlog=4096).detach()
    store = dist.TCPStore(
        address,
        port,
        layout.world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listening,
    )
    dist.init_process_group(
        platform.collective_backend,
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        # Checkpoints have one gloo group of their own, and nothing else uses Megatron's.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def destroy() -> None:
    """Leave the groups; quiet when there are none."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # Models refer to their groups, in cycles, and a gloo group's threads end with its last
    # reference.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
