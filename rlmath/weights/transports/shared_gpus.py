"""Which trainer ranks serve which engine where both share GPUs (``ipc``).

A CUDA IPC handle is of use on its own GPU alone. So the ranks on an engine's GPUs serve that
engine and no other: the first of them calls it, with the handles of these GPUs. A rank sends and
waits for as much at 1,000 GPUs as at 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlmath.errors import ComponentError, WeightsError

if TYPE_CHECKING:
    from rlmath.weights.transports import TransportPlan


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


def rank_gpu() -> str:
    """UUID of this process's GPU."""
    import torch

    device = torch.accelerator.current_device_index()
    return str(torch.cuda.get_device_properties(device).uuid)


def plans_of_ranks(plan: TransportPlan, rank_gpus: Sequence[str]) -> list[TransportPlan]:
    """Of each trainer rank, with the engine on its GPU and who serves it. Called by the driver.

    Args:
        plan: With all engines.
        rank_gpus: See :func:`serving_ranks`.

    Raises:
        ComponentError: An engine did not say which GPUs it has.
        WeightsError: See :func:`serving_ranks`.
    """
    import ray

    asked = [one.call_workers.remote(worker_gpu_uuid) for one in plan.engines]
    try:
        engine_gpus = ray.get(asked)
    except ray.exceptions.RayError as error:
        raise ComponentError(
            f"the weight sync asked the engines for their GPUs, and one failed: {error}",
            raised=isinstance(error, ray.exceptions.RayTaskError),
        ) from error
    plans = [replace(plan, engines=(), others=plan.num_engines) for _ in rank_gpus]
    served = serving_ranks(rank_gpus, engine_gpus)
    for engine, ranks in zip(plan.engines, served, strict=True):
        for rank in ranks:
            plans[rank] = replace(plans[rank], serves=ranks)
        caller = plans[ranks[0]]
        plans[ranks[0]] = replace(caller, engines=(engine,), others=plan.num_engines - 1)
    return plans
