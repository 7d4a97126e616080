"""Placement of CPU ranks and engines on the nodes of a cluster."""

from __future__ import annotations

from typing import Any

from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Placement
from rlmath.errors import UserError

HEAD = "node:__internal_head__"


def shares(layout: RunLayout, nodes: int) -> tuple[list[int], list[int]]:
    """The node of each actor rank and of each engine, as numbers from 0.

    Colocated: both are spread over all nodes. Separate: the first nodes have the engines, in
    proportion to their share of all ranks but at least one node; the others have the actor.
    Neighboring ranks, which share a layer, stay together where possible.
    """
    actor_nodes = engine_nodes = list(range(nodes))
    if layout.placement is Placement.separate:
        ranks = layout.engine_ranks + layout.actor.world_size
        count = min(nodes - 1, max(1, round(nodes * layout.engine_ranks / ranks)))
        engine_nodes, actor_nodes = actor_nodes[:count], actor_nodes[count:]
    return _spread(layout.actor.world_size, actor_nodes), _spread(layout.engines, engine_nodes)


def sorted_nodes() -> list[dict[str, Any]]:
    """The live nodes of the Ray cluster, as Ray describes them: the head, then by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (HEAD not in node["Resources"], *_address(node)))


def has_left(node: str) -> bool:
    """Whether a node is no longer in the cluster. ``node``: Ray's id; empty: no node in particular,
    which cannot leave."""
    return bool(node) and all(one["NodeID"] != node for one in sorted_nodes())


def _address(node: dict[str, Any]) -> tuple[list[tuple[int, str]], int, str]:
    """A sort key: the parts of the address in numeric order, then port and id, as several nodes
    of Ray on one machine share an address."""
    parts = [
        (int(part), "") if part.isdecimal() else (1 << 30, part)
        for part in node["NodeManagerAddress"].split(".")
    ]
    return parts, node["NodeManagerPort"], node["NodeID"]


def refuse_idle_gpus() -> None:
    """Refuse to train on CPUs in a cluster that has GPUs but whose head has none. Raises UserError:
    the cluster has GPUs."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus:
        raise UserError(
            f"cluster.device=auto is cpu on this node, which has no GPU, but the Ray cluster has "
            f"{gpus} GPUs; set cluster.device=cuda, or cpu"
        )


def options_of_nodes(nodes: int) -> list[dict[str, Any]]:
    """Ray options that put an actor on each node, the head first. Raises UserError: the cluster has
    fewer nodes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = sorted_nodes()
    if len(alive) < nodes:
        names = ", ".join(node["NodeManagerAddress"] for node in alive)
        raise UserError(
            f"cluster.nodes={nodes}: the Ray cluster has {len(alive)} ({names}); wait for the "
            "others with ray_utils/check_ray.sh, or lower cluster.nodes"
        )
    return [
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}
        for node in alive[:nodes]
    ]


def _spread(count: int, nodes: list[int]) -> list[int]:
    return [nodes[index * len(nodes) // count] for index in range(count)]
