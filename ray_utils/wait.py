"""Waits until a Ray cluster is complete, for ``ray_utils/check_ray.sh``.

A node started by ``ray_utils/start_ray.sh`` has a resource with its rank's name, by which missing
nodes are identified.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.errors import UserError
from rlmath.utils.command_line import run_command

RANK_PREFIX = "rlmath_rank_"
POLL_S = 1.0
# A rank and an engine each have a process that is always busy.
CORES_PER_GPU = 2


@dataclass(frozen=True)
class Present:
    """Nodes, slots and ranks of a cluster.

    Attributes:
        slots: GPUs of all nodes, or CPUs where there is no GPU.
        unit: ``GPUs`` or ``CPU slots``.
        starved: Descriptions of nodes with too few cores for their GPUs.
    """

    ranks: frozenset[int]
    nodes: int
    slots: int
    unit: str
    starved: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"{self.nodes} nodes, {self.slots} {self.unit}"

    def missing(self, slots: int, nodes: int) -> str:
        """A description of what is missing; empty when there is enough or more."""
        lacking = []
        absent = [rank for rank in range(nodes) if rank not in self.ranks]
        if self.nodes < nodes:
            names = ", ".join(map(str, absent))
            lacking.append(f"{nodes - self.nodes} of {nodes} nodes (RANK {names})")
        if self.slots < slots:
            lacking.append(f"{slots - self.slots} of {slots} {self.unit}")
        return " and ".join(lacking)


def present(nodes: Iterable[Mapping[str, Any]]) -> Present:
    there = [node for node in nodes if node["Alive"]]
    alive = [node["Resources"] for node in there]
    ranks = {
        int(name.removeprefix(RANK_PREFIX))
        for resources in alive
        for name in resources
        if name.startswith(RANK_PREFIX)
    }
    gpus = sum(int(resources.get("GPU", 0)) for resources in alive)
    cpus = sum(int(resources.get("CPU", 0)) for resources in alive)
    starved = tuple(
        f"{node['NodeManagerAddress']} has {node['Resources'].get('CPU', 0):g} for "
        f"{node['Resources']['GPU']:g} GPUs"
        for node in there
        if node["Resources"].get("CPU", 0) < CORES_PER_GPU * node["Resources"].get("GPU", 0)
    )
    unit = "GPUs" if gpus else "CPU slots"
    return Present(frozenset(ranks), len(alive), gpus or cpus, unit, starved)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="check_ray.sh")
    parser.add_argument("slots", type=int)
    parser.add_argument("timeout_s", type=float, nargs="?", default=600.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args(argv)
    import ray
    from ray.exceptions import AuthenticationError

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(address=arguments.address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
        raise UserError(
            f"no Ray head answers at {arguments.address}, or it does not accept this run's token "
            "(RLMATH_SHARED_DIR and RLMATH_RUN_ID must be those of start_ray.sh)"
        ) from error
    deadline, said = time.monotonic() + arguments.timeout_s, ""
    while True:
        now = present(ray.nodes())
        missing = now.missing(arguments.slots, arguments.nodes)
        if not missing and now.starved:
            raise UserError(
                f"a node needs {CORES_PER_GPU} cores for each GPU: {'; '.join(now.starved)}. A "
                "batch system may give a task one core (srun --cpus-per-task=N --cpu-bind=none), "
                "a container a limit (docker run --cpus)"
            )
        if not missing:
            print(f"cluster is complete: {now.describe()}", flush=True)
            return 0
        if missing != said:
            print(f"waiting: {now.describe()} have joined, missing {missing}", flush=True)
            said = missing
        if time.monotonic() > deadline:
            raise UserError(
                f"after {arguments.timeout_s:g} s, the cluster at {arguments.address} is still "
                f"missing {missing}; see the output of start_ray.sh there"
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
