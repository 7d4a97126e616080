"""The accelerators of actor ranks and engines."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.cluster.nodes import options_of_nodes, shares, sorted_nodes
from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Device, Placement
from rlmath.errors import GpuFailure, UserError

if TYPE_CHECKING:
    from rlmath.device.gpu_probe import GpuReport

log = logging.getLogger(__name__)

# Two processes take turns on a shared GPU; Ray only has to count them onto the same one.
COLOCATED_SHARE = 0.5
PLACEMENT_TIMEOUT_S = 300.0
# A file to which the hosts with broken GPUs are written; launchers/launch_cluster.sh sets it.
BAD_NODES_VARIABLE = "RLMATH_BAD_NODES"


@dataclass(frozen=True)
class EnginePlace:
    options: dict[str, Any] = field(default_factory=dict)
    # Its GPUs, one per tensor-parallel rank, as Ray names them on the node; empty on CPU.
    device_ids: tuple[str, ...] = ()
    node: str = ""  # Ray's id of its node; empty where Ray itself refuses a lost node, as on CPU.


@dataclass(frozen=True)
class Places:
    """Ray options of each actor rank, and places of engines and of the teacher's engines, each in
    order."""

    actor_ranks: list[dict[str, Any]] = field(default_factory=list)
    engines: list[EnginePlace] = field(default_factory=list)
    teachers: list[EnginePlace] = field(default_factory=list)


@dataclass(frozen=True)
class Bundle:
    """One reserved GPU."""

    index: int
    node: str  # Ray's id of the node.
    # The GPU's name on the node: a number, or a UUID if CUDA_VISIBLE_DEVICES holds UUIDs there.
    gpu: str


@contextlib.contextmanager
def place(layout: RunLayout, nodes: int = 1) -> Iterator[Places]:
    """Reserve the cluster's accelerators for a layout, until the block ends.

    On CPU nothing is reserved: all processes share the machine, or go to the nodes that
    ``nodes.py`` assigns. On CUDA there is a bundle of one GPU per actor rank, per engine rank
    unless colocated, and per rank of the teacher. Ray numbers the bundles of a group in arbitrary
    order over nodes and GPUs (ray-project/ray#51117, #59547), so they are sorted by node and GPU
    before ranks and engines take them, and every tensor-parallel group is on one node.

    Raises:
        GpuFailure: GPUs are broken, and the working ones are too few.
        UserError: The cluster has too few free GPUs, or too few on one node.
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
    share = COLOCATED_SHARE if layout.placement is Placement.colocated else 1.0
    with _reserve(layout) as (group, of_nodes):
        rank_bundles, engine_bundles, teacher_bundles = assign(layout, of_nodes)
        yield Places(
            [_in_bundle(group, bundle, share) for bundle in rank_bundles],
            [_engine(group, of_engine, share) for of_engine in engine_bundles],
            [_engine(group, of_engine, 1.0) for of_engine in teacher_bundles],
        )


@contextlib.contextmanager
def _reserve(layout: RunLayout) -> Iterator[tuple[Any, list[list[Bundle]]]]:
    """A placement group of working GPUs, and its bundles; see :func:`bundles_by_node`.

    The next try leaves out nodes with a GPU that fails its probe. Raises GpuFailure: the other
    nodes have too few GPUs; UserError: the cluster has too few free GPUs.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = reserved_gpus(layout)
    failed: dict[str, list[GpuReport]] = {}
    while True:
        options: dict[str, Any] = {}
        if failed:
            # Ray's own label of each node.
            without = {"ray.io/node-id": f"!in({','.join(failed)})"}
            options["bundle_label_selector"] = [without] * bundles
        group = placement_group([{"GPU": 1}] * bundles, strategy="PACK", **options)
        try:
            try:
                ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError as error:
                if failed:
                    raise _gpu_failure(bundles, failed) from error
                raise UserError(_too_few(layout, bundles)) from error
            of_nodes, faulty = bundles_by_node(group, bundles)
            if not faulty:
                yield group, of_nodes
                return
        finally:
            remove_placement_group(group)
        for node, reports in faulty.items():
            failed[node] = reports
            for report in reports:
                log.warning("%s; its node is left out", report.describe())
        if _gpus_without(failed) < bundles:
            raise _gpu_failure(bundles, failed)


def _gpus_without(nodes: Collection[str]) -> int:
    alive = [node for node in sorted_nodes() if node["NodeID"] not in nodes]
    return sum(int(node["Resources"].get("GPU", 0)) for node in alive)


def _gpu_failure(bundles: int, failed: Mapping[str, Sequence[GpuReport]]) -> GpuFailure:
    """The error, after the bad nodes were recorded for launchers that can exclude them."""
    reports = [report for of_node in failed.values() for report in of_node]
    hosts = list(dict.fromkeys(report.host for report in reports))
    if path := os.environ.get(BAD_NODES_VARIABLE):
        Path(path).write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
    faults = "".join(f"\n  - {report.describe()}" for report in reports)
    return GpuFailure(
        f"{bundles} GPUs are needed, and the nodes without a broken one have "
        f"{_gpus_without(failed)}, or other jobs use them:{faults}\n"
        f"Reset or replace them, or start without {', '.join(hosts)} "
        f"(sbatch --exclude={','.join(hosts)})"
    )


def _too_few(layout: RunLayout, bundles: int) -> str:
    import ray

    have = int(ray.cluster_resources().get("GPU", 0))
    teacher = f", {layout.teacher_ranks} of the teacher" if layout.teacher_ranks else ""
    return (
        f"{bundles} GPUs are needed ({layout.actor.world_size} actor ranks, "
        f"{layout.engine_ranks} engine ranks, {layout.placement.value}{teacher}), but the Ray "
        f"cluster has {have}, or other jobs use them; wait for nodes, or shrink the layout."
    )


def bundles_by_node(
    group: Any, count: int
) -> tuple[list[list[Bundle]], dict[str, list[GpuReport]]]:
    """The bundles of a ready placement group, node by node in order of their GPUs; and the broken
    GPUs, by Ray's id of their node.

    Ray tells a bundle's node, but its GPU only to tasks that run in the bundle, so a small task in
    each bundle reports and probes it. The bundle keeps that GPU. Raises UserError: tasks do not
    start on some node.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    from rlmath.device.gpu_probe import PROBE_TIMEOUT_S

    node_of = placement_group_table(group)["bundles_to_node_id"]
    probe = ray.remote(num_cpus=0, num_gpus=1)(probe_own_gpu)
    refs = [probe.options(**_strategy(group, index)).remote() for index in range(count)]
    timeout_s = PLACEMENT_TIMEOUT_S + PROBE_TIMEOUT_S
    try:
        found: list[GpuReport] = ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        silent = len(ray.wait(refs, num_returns=count, timeout=0)[1])
        raise UserError(
            f"{silent} of {count} reserved GPUs did not answer within {timeout_s:g} s: "
            "Ray cannot start processes on their nodes; see `ray status` and the nodes' Ray logs"
        ) from error
    faulty: dict[str, list[GpuReport]] = {}
    for index, report in enumerate(found):
        if report.fault:
            faulty.setdefault(node_of[index], []).append(report)
    bundles = [Bundle(index, node_of[index], report.gpu) for index, report in enumerate(found)]
    return in_order(bundles, [node["NodeID"] for node in sorted_nodes()]), faulty


def probe_own_gpu() -> GpuReport:
    import ray

    from rlmath.device.gpu_probe import probe

    (gpu,) = ray.get_gpu_ids()
    return probe(str(gpu))


def reserved_gpus(layout: RunLayout) -> int:
    ranks = (layout.actor.world_size, layout.engine_ranks)
    colocated = layout.placement is Placement.colocated
    return (max(ranks) if colocated else sum(ranks)) + layout.teacher_ranks


def whole_nodes(gpus: int, gpus_per_node: int) -> list[list[Bundle]]:
    """The bundles that Ray's PACK strategy reserves on free nodes, node by node."""
    return [
        [
            Bundle(index, f"node {first // gpus_per_node}", str(index - first))
            for index in range(first, min(gpus, first + gpus_per_node))
        ]
        for first in range(0, gpus, gpus_per_node)
    ]


def in_order(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[list[Bundle]]:
    """Bundles grouped by node in the order given, each group by GPU; empty groups left out."""
    by_node = [[bundle for bundle in bundles if bundle.node == node] for node in nodes]

    def numbers_first(bundle: Bundle) -> tuple[int, str]:
        return (int(bundle.gpu), "") if bundle.gpu.isdecimal() else (1 << 30, bundle.gpu)

    return [sorted(of_node, key=numbers_first) for of_node in by_node if of_node]


def assign(
    layout: RunLayout, nodes: Sequence[Sequence[Bundle]]
) -> tuple[list[Bundle], list[list[Bundle]], list[list[Bundle]]]:
    """The bundle of each actor rank, and the bundles of each engine and of each teacher engine.

    Colocated, ranks and engines both take the bundles from the first on, so that an engine shares
    the GPUs of the ranks with the same indices. Among groups that share no GPUs, the wider
    tensor-parallel ones choose first. Raises UserError: a tensor-parallel group would be on two
    nodes.
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
    # Parts in one tuple share GPUs.
    sharing = [("actor", "rollout")] if colocated else [("actor",), ("rollout",)]
    order = [*sharing, ("teacher",)]
    order.sort(key=lambda ones: -max(wanted[one][0] for one in ones))
    taken: dict[str, list[list[Bundle]]] = {}
    for ones in order:
        for one in ones:
            width, count = wanted[one]
            taken[one] = _blocks(free, width, count)
            if len(taken[one]) < count:
                raise UserError(_straddles(one, width, count, [len(of_node) for of_node in free]))
        gone = {bundle for one in ones for block in taken[one] for bundle in block}
        free = [[bundle for bundle in of_node if bundle not in gone] for of_node in free]
    actor = [bundle for block in taken["actor"] for bundle in block]
    return actor, taken["rollout"], taken["teacher"]


def _blocks(nodes: Sequence[Sequence[Bundle]], width: int, count: int) -> list[list[Bundle]]:
    """At most ``count`` blocks of ``width`` bundles, each on one node."""
    blocks: list[list[Bundle]] = []
    for of_node in nodes:
        number = min(len(of_node) // width, count - len(blocks))
        blocks += [list(of_node[i * width : (i + 1) * width]) for i in range(number)]
    return blocks


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
    """Place an engine. With one rank it gets its GPU from Ray. A wider one runs beside its first
    GPU and takes none from Ray, which gives an actor GPUs of one bundle only; its workers find
    theirs by name."""
    gpus = share if len(bundles) == 1 else 0
    first, device_ids = bundles[0], tuple(bundle.gpu for bundle in bundles)
    return EnginePlace(_in_bundle(group, first, gpus), device_ids, first.node)
