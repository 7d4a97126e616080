"""What the driver asks the engines' workers before ranks meet them: which trainer ranks serve which
engine where both share GPUs (``ipc``), and what workers keep of an MoE's experts.

A CUDA IPC handle is of use on its own GPU alone. So the ranks on an engine's GPUs serve that
engine and no other: the first of them calls it, with the handles of these GPUs. A rank sends and
waits for as much at 1,000 GPUs as at 8. Of an MoE's experts it needs what its engine's worker
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlmath.errors import ComponentError, WeightsError
from rlmath.weights.expert_shares import NOTHING, ExpertShare

if TYPE_CHECKING:
    from rlmath.weights.transports import TransportPlan


@dataclass(frozen=True)
class WorkerPlace:
    """What an engine's worker says of itself.

    Attributes:
        gpu: Its GPU's UUID, under which it looks for a handle.
        experts: What it keeps of them; ``None``: there are none, or it cannot say.
    """

    gpu: str
    experts: ExpertShare | None


def worker_place(worker: Any) -> WorkerPlace:
    """Runs in a vLLM worker."""
    import torch

    from rlmath.weights.transports.engine_parts import expert_share

    gpu = str(torch.cuda.get_device_properties(worker.device.index).uuid)
    return WorkerPlace(gpu, expert_share(worker.model_runner.get_model()))


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


def worker_places(engines: Sequence[Any]) -> list[list[WorkerPlace]]:
    """What the workers of each engine say of themselves, in the order of their ranks.

    Raises:
        ComponentError: An engine did not answer.
    """
    import ray

    asked = [one.call_workers.remote(worker_place) for one in engines]
    try:
        found: list[list[WorkerPlace]] = ray.get(asked)
    except ray.exceptions.RayError as error:
        raise ComponentError(
            f"the weight sync asked the engines for their GPUs, and one failed: {error}",
            raised=isinstance(error, ray.exceptions.RayTaskError),
        ) from error
    return found


def with_worker_shares(plan: TransportPlan) -> TransportPlan:
    """For ``nccl``: with what the workers of an engine keep of the experts, if all engines' keep
    the same. Called by the driver.

    Raises:
        ComponentError: See :func:`worker_places`.
    """
    if plan.adapters or plan.ranks_per_engine == 1:
        return plan
    engines = {tuple(one.experts for one in workers) for workers in worker_places(plan.engines)}
    shares = engines.pop()
    if engines or None in shares:
        return plan
    return replace(plan, worker_shares=tuple(one for one in shares if one is not None))


def plans_of_ranks(plan: TransportPlan, rank_gpus: Sequence[str]) -> list[TransportPlan]:
    """Of each trainer rank, with the engine on its GPU and who serves it. Called by the driver.

    Args:
        plan: With all engines.
        rank_gpus: See :func:`serving_ranks`.

    Raises:
        ComponentError: See :func:`worker_places`.
        WeightsError: See :func:`serving_ranks`.
    """
    places = worker_places(plan.engines)
    served = serving_ranks(rank_gpus, [[place.gpu for place in engine] for engine in places])
    serving = frozenset(rank for ranks in served for rank in ranks)
    nobody = replace(
        plan,
        engines=(),
        others=plan.num_engines,
        # Of every rank, told to every rank: where that says something.
        serving=serving if len(serving) < len(rank_gpus) else None,
        experts=NOTHING,
    )
    plans = [nobody for _ in rank_gpus]
    for ranks, workers in zip(served, places, strict=True):
        for rank, worker in zip(ranks, workers, strict=True):
            plans[rank] = replace(plans[rank], serves=ranks, experts=worker.experts)
    if any(worker.experts is None for engine in places for worker in engine) or plan.adapters:
        plans = [replace(one, experts=None) for one in plans]
    for engine, ranks in zip(plan.engines, served, strict=True):
        caller = plans[ranks[0]]
        plans[ranks[0]] = replace(caller, engines=(engine,), others=plan.num_engines - 1)
    return plans
