"""Which accelerator each actor rank and each engine gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlmath.cluster.nodes import options_of_nodes, shares
from rlmath.config.arithmetic import Layout
from rlmath.config.schema import Device, Placement
from rlmath.errors import UserError

# Two processes take turns on a shared GPU; Ray only has to count them onto the same one.
COLOCATED_SHARE = 0.5
PLACEMENT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Places:
    """Ray options of each actor rank and of each engine, in their order."""

    actor_ranks: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def placed(layout: Layout, nodes: int = 1) -> Iterator[Places]:
    """Reserve the cluster's accelerators for a layout; given back at the end.

    On CPU nothing is reserved: all processes share the machine, or go to the nodes that
    ``nodes.py`` gives them. On CUDA there is a bundle of one
    GPU for each actor rank, packed node by node, so that tensor-parallel neighbours share a node.
    Colocated engines take the same bundles in the same order; others have bundles of their own.

    Raises:
        UserError: The cluster does not have so many free GPUs.
    """
    if layout.device is Device.cpu:
        if nodes > 1:
            options = options_of_nodes(nodes)
            of_ranks, of_engines = shares(layout, nodes)
            yield Places([options[i] for i in of_ranks], [options[i] for i in of_engines])
            return
        yield Places([{}] * layout.actor_ranks, [{}] * layout.engines)
        return
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    colocated = layout.placement is Placement.colocated
    bundles = max(layout.actor_ranks, layout.engine_ranks)
    if not colocated:
        bundles = layout.actor_ranks + layout.engine_ranks
    group = placement_group([{"GPU": 1, "CPU": 1}] * bundles, strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            have = int(ray.cluster_resources().get("GPU", 0))
            raise UserError(
                f"{bundles} GPUs are needed ({layout.actor_ranks} actor ranks, "
                f"{layout.engine_ranks} engine ranks, {layout.placement.value}), but the Ray "
                f"cluster has {have}, or others hold them; wait for nodes, or shrink the layout."
            ) from error
        share = COLOCATED_SHARE if colocated else 1.0
        first_engine_bundle = 0 if colocated else layout.actor_ranks
        width = layout.engine_tensor_parallel
        yield Places(
            [_in_bundle(group, rank, share) for rank in range(layout.actor_ranks)],
            [
                _engine(group, first_engine_bundle + engine * width, width, share)
                for engine in range(layout.engines)
            ],
        )
    finally:
        remove_placement_group(group)


def _in_bundle(group: Any, bundle: int, gpus: float) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_gpus": gpus, "num_cpus": 0, "scheduling_strategy": strategy}


def _engine(group: Any, bundle: int, width: int, share: float) -> dict[str, Any]:
    """An engine of one rank sits on its GPU; a wider one has Ray place its workers."""
    if width == 1:
        return _in_bundle(group, bundle, share)
    options = _in_bundle(group, bundle, 0)
    # vLLM's Ray executor places one worker per bundle index, each with this share of a GPU.
    variables = {
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(bundle + i) for i in range(width)),
        "VLLM_RAY_PER_WORKER_GPUS": str(share),
    }
    return {**options, "runtime_env": {"env_vars": variables}}
