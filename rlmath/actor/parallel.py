"""Process groups of the Megatron ranks."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rlmath.device import Platform


@dataclass(frozen=True)
class Layout:
    """How the actor's ranks share the model and the data. Ranks = tp x pp x dp."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


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
        seed: Of Megatron's random streams.
        timeout_s: How long a collective may wait for the others.
    """
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group(
        platform.collective_backend,
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        create_gloo_process_groups=platform.collective_backend != "gloo",
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Leave the groups; quiet when there are none."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    # Models refer to their groups, in cycles, and a gloo group's threads end with its last
    # reference.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
