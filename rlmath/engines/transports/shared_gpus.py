"""Questions of the driver to the engines' workers before ranks connect: which trainer ranks serve
which engine if they share GPUs (``ipc``), and the workers' shares of an MoE's experts.

A CUDA IPC handle is valid only on its own GPU. Therefore the ranks on an engine's GPUs serve only
that engine: the first of them calls it, with the handles of these GPUs. A rank sends and waits for
as much at 1,000 GPUs as at 8. It needs only the experts that its engine's worker keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlmath.device.nvidia import current_gpu_uuid
from rlmath.errors import ComponentError, WeightsError
from rlmath.weights.expert_shares import NOTHING, ExpertShare

if TYPE_CHECKING:
    from rlmath.engines.transports import TransportPlan


@dataclass(frozen=True)
class WorkerPlace:
    """An engine worker's description of itself."""

    gpu: str  # Its GPU's UUID.
    # Its share of the experts; None if there are none, or it is unknown.
    experts: ExpertShare | None


def worker_place(worker: Any) -> WorkerPlace:
    """Runs in a vLLM worker."""
    from rlmath.engines.transports.engine_parts import expert_share

    return WorkerPlace(current_gpu_uuid(), expert_share(worker.model_runner.get_model()))


def serving_ranks(
    rank_gpus: Sequence[str], engine_gpus: Sequence[Sequence[str]]
) -> list[tuple[int, ...]]:
    """The trainer ranks on each engine's GPUs; the first of them calls it. Raises WeightsError: a
    worker's GPU has no trainer rank, or several. ``rank_gpus``: UUID of each trainer rank's GPU.
    ``engine_gpus``: UUIDs of the GPUs of each engine's workers."""
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


def worker_places(engines: Sequence[Any]) -> list[list[WorkerPlace]]:
    """Descriptions of the workers of each engine, in rank order. Raises ComponentError: an engine
    did not answer."""
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
    """Plan for ``nccl`` with the workers' shares of the experts, if they are the same in all
    engines. Called by the driver. Raises ComponentError: as :func:`worker_places`."""
    if plan.adapters or plan.ranks_per_engine == 1:
        return plan
    engines = {tuple(one.experts for one in workers) for workers in worker_places(plan.engines)}
    shares = engines.pop()
    if engines or None in shares:
        return plan
    return replace(plan, worker_shares=tuple(one for one in shares if one is not None))


def plans_of_ranks(plan: TransportPlan, rank_gpus: Sequence[str]) -> list[TransportPlan]:
    """Plans of all trainer ranks, with the engine on each rank's GPU and the ranks that serve it.
    Called by the driver.

    Args:
        rank_gpus: As in :func:`serving_ranks`.

    Raises:
        ComponentError: As :func:`worker_places`.
        WeightsError: As :func:`serving_ranks`.
    """
    places = worker_places(plan.engines)
    served = serving_ranks(rank_gpus, [[place.gpu for place in engine] for engine in places])
    serving = frozenset(rank for ranks in served for rank in ranks)
    nobody = replace(
        plan,
        engines=(),
        others=plan.num_engines,
        # Sent to every rank, so only if not all of them serve an engine.
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
