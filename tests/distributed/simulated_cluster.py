"""Places ranks and engines on a Ray cluster of several virtual nodes, and prints who got which GPU.

What is real: Ray's scheduler, its placement groups, and the GPU ids that it gives to processes.
What stands in: the nodes are raylets of this machine, a head without GPUs and others that claim
GPUs which are not there; the probe of a GPU is FORGED, and finds those broken that a case names; a
task takes the place of each rank and of each engine's process, with the options that these would
have; and the order in which Ray numbers bundles is forced to alternate between nodes, as a busy
cluster may do it, by asking for each bundle on any node it likes.

Prints one JSON object.
"""

import importlib
import json
import os
import sys

# The other setting of Ray's, under which an actor without a GPU of Ray's sees none.
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
from ray.cluster_utils import Cluster

from rlmath.cluster import placement
from rlmath.cluster.session import without_services
from rlmath.config.arithmetic import RunLayout
from rlmath.config.schema import Device, Placement
from rlmath.engines.requests import EngineSpec
from rlmath.errors import UserError
from rlmath.model.parallel import Layout

NODES, GPUS_OF_A_NODE = 2, 4
LABEL = "virtual-node"
# ``ray.util`` has a function of the same name.
placement_groups = importlib.import_module("ray.util.placement_group")
given_placement_group = placement_groups.placement_group


def main():
    # Idle workers wait for the next case.
    keep = {
        "idle_worker_killing_time_threshold_ms": 600_000,
        "num_workers_soft_limit": 8,
        "prestart_worker_first_driver": False,
    }
    cluster = Cluster()
    with without_services():
        add_nodes(cluster, keep)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        names = {n["NodeID"]: int(n["Labels"][LABEL]) for n in ray.nodes()}
        cases = json.loads(sys.argv[1])
        print("RESULT " + json.dumps([place(case, names) for case in cases]))
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_nodes(cluster, keep):
    """Start the virtual nodes; ``keep``: Ray's settings."""
    for node in range(-1, NODES):
        # The head's settings are the cluster's.
        of_head = {"_system_config": keep} if node < 0 else {}
        cluster.add_node(
            **of_head,
            # Ray starts as many workers at once, and the tasks are short: few serve all of them.
            num_cpus=1,
            num_gpus=0 if node < 0 else GPUS_OF_A_NODE,
            object_store_memory=80 * 2**20,
            labels={LABEL: str(node)},
            include_dashboard=False,
        )


def place(case, names):
    """Who got what in one case, or the message of the refusal."""
    bundles_of_nodes = case["bundles_of_nodes"]
    force_alternation(bundles_of_nodes)
    placement.probe_own_gpu = forged_probe(names, case.get("broken", []))
    layout = RunLayout(
        device=Device.cuda,
        actor=Layout(case["tp"], 1, case["ranks"] // case["tp"]),
        engines=case["engines"],
        engine_tensor_parallel=case["engine_tp"],
        accelerators=sum(bundles_of_nodes),
        placement=Placement(case["placement"]),
    )
    try:
        with placement.place(layout) as places:
            table = ray.util.placement_group_table()
            states = [
                one["bundles_to_node_id"] for one in table.values() if one["state"] == "CREATED"
            ]
            where = ray.remote(max_retries=0)(here)
            ranks = [where.options(**options).remote() for options in places.actor_ranks]
            ranks = ray.get(ranks)
            engines = [where.options(**engine.options).remote() for engine in places.engines]
            of_engines = [
                {**found, "device_ids": engine.device_ids}
                for found, engine in zip(ray.get(engines), places.engines, strict=True)
            ]
            visible = None
            if case.get("asks_what_an_engine_sees"):
                visible = what_an_engine_sees(places.engines[0])
    except UserError as error:
        return {"refused": str(error), "exit_code": error.exit_code}
    bundles = [names[node] for _, node in sorted(states[-1].items())]
    for found in [*ranks, *of_engines]:
        found["node"] = names[found["node"]]
    return {"bundles": bundles, "ranks": ranks, "engines": of_engines, "visible": visible}


def here():
    """Node and GPUs of this process."""
    context = ray.get_runtime_context()
    return {"node": context.get_node_id(), "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}


class Report:
    """A GpuReport for who receives it; its package would import torch into every worker."""

    def __init__(self, *fields):
        self.fields = fields

    def __reduce__(self):
        return gpu_report, self.fields


def gpu_report(*fields):
    from rlmath.device.gpu_probe import GpuReport

    return GpuReport(*fields)


def forged_probe(names, broken):
    """In the place of the probe, which needs a GPU: a GPU is broken if it is in the list."""

    def probe():
        found = here()
        (gpu,) = found["gpus"]
        host = f"host-{names[found['node']]}"
        fault = "forged fault (XID 79 in the kernel's log)" if f"{host}/{gpu}" in broken else ""
        return Report(host, gpu, fault)

    return probe


class Environment:
    """Takes the place of an engine's actor."""

    def visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")


def what_an_engine_sees(place):
    """CUDA_VISIBLE_DEVICES of an actor, with and without an engine's environment."""
    spec = EngineSpec("m", "bfloat16", "cuda", 2, 8, 8, "ipc", "logs")
    found = {}
    for name, variables in (("with", spec.environment()), ("without", {})):
        options = {**place.options, "runtime_env": {"env_vars": variables}}
        actor = ray.remote(Environment).options(**options).remote()
        found[name] = ray.get(actor.visible.remote())
        ray.kill(actor)
    return found


def force_alternation(bundles_of_nodes):
    """Have Ray number the bundles across the nodes: 0 on the first, 1 on the second, and so on."""
    left, order = list(bundles_of_nodes), []
    while any(left):
        for node, count in enumerate(left):
            if count:
                order.append(str(node))
                left[node] -= 1

    def alternating(bundles, **options):
        assert len(bundles) == len(order), (bundles, order)
        if "bundle_label_selector" in options:  # A second try, which leaves nodes out.
            return given_placement_group(bundles, **options)
        selectors = [{LABEL: node} for node in order]
        return given_placement_group(bundles, bundle_label_selector=selectors, **options)

    placement_groups.placement_group = alternating


if __name__ == "__main__":
    main()
