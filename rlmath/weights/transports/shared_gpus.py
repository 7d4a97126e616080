"""Which trainer ranks serve which engine where both share GPUs (``ipc``).

A CUDA IPC handle is of use on its own GPU alone. So the ranks on an engine's GPUs serve that
engine and no other: the first of them calls it, with the handles of these GPUs. A rank sends and
waits for as much at 1,000 GPUs as at 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rlmath.errors import WeightsError


def worker_gpu_uuid(worker: Any) -> str:
    """Runs in a vLLM worker: its GPU's UUID, under which it looks for a handle."""
    import torch

    return str(torch.cuda.get_device_properties(worker.device.index).uuid)


def serving_ranks(
    rank_gpus: Sequence[str], engine_gpus: Sequence[Sequence[str]]
) -> list[tuple[int, ...]]:
    """Of each engine, the trainer ranks on its GPUs; the first of them calls it.

    Args:
        rank_gpus: UUID of each trainer rank's GPU.
        engine_gpus: Of each engine, the UUIDs of its workers' GPUs.

    Raises:
        WeightsError: A worker's GPU has no trainer rank, or several.
    """
    rank_of = {gpu: rank for rank, gpu in enumerate(rank_gpus)}
    if len(rank_of) != len(rank_gpus):
        raise WeightsError(
            f"{len(rank_gpus)} trainer ranks have {len(rank_of)} GPUs: weights.transport=ipc needs "
            "one GPU for each rank"
        )
    served = []
    for engine, gpus in enumerate(engine_gpus):
        missing = [gpu for gpu in gpus if gpu not in rank_of]
        if missing:
            raise WeightsError(
                f"engine {engine} has workers on {', '.join(missing)}, where no trainer rank is, "
                "and weights.transport=ipc works within a GPU only: use cluster.placement=separate"
            )
        served.append(tuple(rank_of[gpu] for gpu in gpus))
    return served


def meet(engines: Sequence[Any], gpu: str) -> tuple[Any, tuple[int, ...]]:
    """Find the engine on this rank's GPU. Collective over all trainer ranks.

    Args:
        engines: Handles of ``RolloutEngine`` actors, the same on all ranks.
        gpu: UUID of this rank's GPU.

    Returns:
        The engine's handle and the ranks that serve it; ``None`` and no ranks where there is none.

    Raises:
        WeightsError: See :func:`serving_ranks`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    engine_gpus: list[list[list[str]]] = [[]]
    if rank == 0:
        import ray

        engine_gpus = [ray.get([one.call_workers.remote(worker_gpu_uuid) for one in engines])]
    rank_gpus = [gpu]
    if world > 1:
        rank_gpus = [""] * world
        dist.all_gather_object(rank_gpus, gpu)
        dist.broadcast_object_list(engine_gpus, src=0)
    for engine, ranks in zip(engines, serving_ranks(rank_gpus, engine_gpus[0]), strict=True):
        if rank in ranks:
            return engine, ranks
    return None, ()
