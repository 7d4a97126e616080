"""Which accelerator each actor rank and each engine gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmath.cluster.nodes import options_of_nodes, shares, sorted_nodes
from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Device, Placement
from rlmath.errors import UserError

# Two processes take turns on a shared GPU; Ray only has to count them onto the same one.
COLOCATED_SHARE = 0.5
PLACEMENT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine goes.

    Attributes:
        options: Ray options of its actor.
        device_ids: Its GPUs, one for each tensor-parallel rank, as Ray names them on the node; none
            on CPU.
    """

    options: dict[str, Any] = field(default_factory=dict)
    device_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """Ray options of each actor rank, and the place of each engine, in their order; of the
    teacher's engines too."""

    actor_ranks: list[dict[str, Any]] = field(default_factory=list)
    engines: list[EnginePlace] = field(default_factory=list)
    teachers: list[EnginePlace] = field(default_factory=list)


@dataclass(frozen=True)
class Bundle:
    """One reserved GPU.

    Attributes:
        index: Of the bundle in its placement group.
        node: Ray's id of the node.
        gpu: The GPU's name on the node: a number, or a UUID if the node's CUDA_VISIBLE_DEVICES
            has such.
    """

    index: int
    node: str
    gpu: str


@contextlib.contextmanager
def placed(layout: RunLayout, nodes: int = 1) -> Iterator[Places]:
    """Reserve the cluster's accelerators for a layout; given back at the end.

    On CPU nothing is reserved: all processes share the machine, or go to the nodes that
    ``nodes.py`` gives them. On CUDA there is a bundle of one GPU for each actor rank and, unless
    they are colocated, for each engine rank, and one for each rank of the teacher. Ray numbers the
    bundles of a group in any order over nodes and GPUs (ray-project/ray#51117, #59547), so they are
    sorted by node and GPU before ranks and engines take them, and every tensor-parallel group is on
    one node.

    Raises:
        UserError: The cluster has too few free GPUs, or not enough of them on one node.
    """
    if layout.device is Device.cpu:
        if nodes > 1:
            options = options_of_nodes(nodes)
            of_ranks, of_engines = shares(layout, nodes)
            of_teacher = [i % nodes for i in range(layout.teacher_engines)]
            yield Places(
                [options[i] for i in of_ranks],
                [EnginePlace(options[i]) for i in of_engines],
                [EnginePlace(options[i]) for i in of_teacher],
            )
            return
        yield Places(
            [{}] * layout.actor.world_size,
            [EnginePlace()] * layout.engines,
            [EnginePlace()] * layout.teacher_engines,
        )
        return
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    colocated = layout.placement is Placement.colocated
    bundles = reserved_gpus(layout)
    group = placement_group([{"GPU": 1}] * bundles, strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            have = int(ray.cluster_resources().get("GPU", 0))
            raise UserError(
                f"{bundles} GPUs are needed ({layout.actor.world_size} actor ranks, "
                f"{layout.engine_ranks} engine ranks, {layout.placement.value}"
                f"{f', {layout.teacher_ranks} of the teacher' if layout.teacher_ranks else ''}), "
                "but the Ray "
                f"cluster has {have}, or other jobs use them; wait for nodes, or shrink the layout."
            ) from error
        rank_bundles, engine_bundles, teacher_bundles = assign(
            layout, bundles_by_node(group, bundles)
        )
        share = COLOCATED_SHARE if colocated else 1.0
        yield Places(
            [_in_bundle(group, bundle, share) for bundle in rank_bundles],
            [_engine(group, of_engine, share) for of_engine in engine_bundles],
            [_engine(group, of_engine, 1.0) for of_engine in teacher_bundles],
        )
    finally:
        remove_placement_group(group)


def bundles_by_node(group: Any, count: int) -> list[list[Bundle]]:
    """The bundles of a placement group that is ready, in order of their GPUs, node by node.

    Ray tells a bundle's node, but its GPU only to what runs in it, so a small task in each bundle
    reports it. The bundle keeps that GPU.

    Raises:
        UserError: Tasks do not start on some node.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    probe = ray.remote(num_cpus=0, num_gpus=1)(_gpus_of_this_process)
    refs = [probe.options(**_strategy(group, index)).remote() for index in range(count)]
    try:
        gpus = ray.get(refs, timeout=PLACEMENT_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        silent = len(ray.wait(refs, num_returns=count, timeout=0)[1])
        raise UserError(
            f"{silent} of {count} reserved GPUs did not answer within {PLACEMENT_TIMEOUT_S:g} s: "
            "Ray cannot start processes on their nodes; see `ray status` and the nodes' Ray logs"
        ) from error
    bundles = [Bundle(index, node_of[index], str(gpus[index][0])) for index in range(count)]
    return in_order(bundles, [node["NodeID"] for node in sorted_nodes()])


def reserved_gpus(layout: RunLayout) -> int:
    """GPUs that a layout reserves."""
    ranks = (layout.actor.world_size, layout.engine_ranks)
    colocated = layout.placement is Placement.colocated
    return (max(ranks) if colocated else sum(ranks)) + layout.teacher_ranks


def whole_nodes(gpus: int, gpus_per_node: int) -> list[list[Bundle]]:
    """The bundles that Ray's PACK reserves of nodes that are free: node by node."""
    return [
        [
            Bundle(index, f"node {first // gpus_per_node}", str(index - first))
            for index in range(first, min(gpus, first + gpus_per_node))
        ]
        for first in range(0, gpus, gpus_per_node)
    ]


def in_order(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[list[Bundle]]:
    """The bundles of each node that has some, by GPU; nodes in the order given."""
    by_node = [[bundle for bundle in bundles if bundle.node == node] for node in nodes]
    return [sorted(of_node, key=_gpu_order) for of_node in by_node if of_node]


def assign(
    layout: RunLayout, nodes: Sequence[Sequence[Bundle]]
) -> tuple[list[Bundle], list[list[Bundle]], list[list[Bundle]]]:
    """The bundle of each actor rank, and the bundles of each engine, and of each of the teacher's.

    Colocated, ranks and engines both take the bundles from the first on, so that an engine sits on
    the GPUs of the ranks that come at the same place. Of those that share no GPUs, the wider
    tensor-parallel groups choose first.

    Args:
        layout: Ranks and engines.
        nodes: Bundles of each node, in order.

    Raises:
        UserError: A tensor-parallel group would be on two nodes.
    """
    free = [list(of_node) for of_node in nodes]
    wanted = {
        "actor": (
            layout.actor.tensor_parallel,
            layout.actor.world_size // layout.actor.tensor_parallel,
        ),
        "rollout": (layout.engine_tensor_parallel, layout.engines),
        "teacher": (layout.teacher_tensor_parallel, layout.teacher_engines),
    }
    colocated = layout.placement is Placement.colocated
    # Those of a tuple share GPUs.
    sharing = [("actor", "rollout")] if colocated else [("actor",), ("rollout",)]
    order = [*sharing, ("teacher",)]
    order.sort(key=lambda ones: -max(wanted[one][0] for one in ones))
    taken: dict[str, list[list[Bundle]]] = {}
    for ones in order:
        for one in ones:
            width, count = wanted[one]
            taken[one], _ = _blocks(free, width, count)
            if len(taken[one]) < count:
                raise UserError(_straddles(one, width, count, [len(of_node) for of_node in free]))
        gone = {bundle for one in ones for block in taken[one] for bundle in block}
        free = [[bundle for bundle in of_node if bundle not in gone] for of_node in free]
    actor = [bundle for block in taken["actor"] for bundle in block]
    return actor, taken["rollout"], taken["teacher"]


def _blocks(
    nodes: Sequence[Sequence[Bundle]], width: int, count: int
) -> tuple[list[list[Bundle]], list[list[Bundle]]]:
    """At most ``count`` blocks of ``width`` bundles, each on one node; and what is left."""
    blocks: list[list[Bundle]] = []
    left = []
    for of_node in nodes:
        number = min(len(of_node) // width, count - len(blocks))
        blocks += [list(of_node[i * width : (i + 1) * width]) for i in range(number)]
        left.append(list(of_node[number * width :]))
    return blocks, left


def _straddles(section: str, width: int, count: int, gpus: Sequence[int]) -> str:
    room = [number // width for number in gpus]
    return (
        f"{section}.tensor_parallel={width}: {count} groups of {width} GPUs are needed, each on "
        f"one node, but of the nodes {len(gpus)} have {_sum(gpus)} GPUs for them, with room for "
        f"{_sum(room)} = {sum(room)}; free whole nodes, or set {section}.tensor_parallel to a "
        "divisor of what each node has free"
    )


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


def _gpus_of_this_process() -> list[Any]:
    import ray

    return ray.get_gpu_ids()


def _gpu_order(bundle: Bundle) -> tuple[int, str]:
    """Numbers in their order, then other names."""
    return (int(bundle.gpu), "") if bundle.gpu.isdecimal() else (1 << 30, bundle.gpu)


def _strategy(group: Any, bundle: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
    }


def _in_bundle(group: Any, bundle: Bundle, gpus: float) -> dict[str, Any]:
    return {"num_gpus": gpus, "num_cpus": 0, **_strategy(group, bundle.index)}


def _engine(group: Any, bundles: Sequence[Bundle], share: float) -> EnginePlace:
    """An engine of one rank has its GPU from Ray. A wider one runs beside its first GPU and takes
    none from Ray, which gives an actor GPUs of one bundle only; its workers find theirs by name."""
    gpus = share if len(bundles) == 1 else 0
    return EnginePlace(_in_bundle(group, bundles[0], gpus), tuple(bundle.gpu for bundle in bundles))
