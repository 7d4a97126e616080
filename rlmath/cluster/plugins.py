"""Checks that each node of the cluster can import the plug-ins, before ranks start there."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.cluster.nodes import sorted_nodes
from rlmath.errors import ConfigError, UserError
from rlmath.plugins.loading import Imported, imported_plugins, setup_hook

# Longest time for a process to start and import, from a disk that many nodes read at once.
ANSWER_S = 400.0


def check_plugins() -> None:
    """Import this process's plug-ins in a process on each node, as ranks and engines will. Raises
    ConfigError: a node lacks a package or has another source of it; the message names both.
    UserError: a node starts no process."""
    if setup_hook() is None:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted_nodes()
    answers = [
        ray.remote(imported_plugins)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for node in nodes
    ]
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)
    silent = [
        node["NodeManagerAddress"]
        for node, answer in zip(nodes, answers, strict=True)
        if answer not in done
    ]
    if silent:
        raise UserError(
            f"plugins: Ray has started no process on {', '.join(silent)} in {ANSWER_S:g} s. See "
            "Ray's logs there (a full disk?), or take the node out of the cluster"
        )
    here = imported_plugins()
    problems = [
        problem
        for node, answer in zip(nodes, ray.get(answers), strict=True)
        for problem in _problems(node["NodeManagerAddress"], here, answer)
    ]
    if problems:
        raise ConfigError.of(problems)


def _problems(node: str, here: Imported, there: Imported) -> Iterator[str]:
    for message in there.failed:
        yield f"plugins on node {node}: {message}"
    for name in sorted(here.hashes.keys() & there.hashes.keys()):
        if here.hashes[name] != there.hashes[name]:
            yield (
                f"plugins on node {node}: {name} has the hash {there.hashes[name]}, and here "
                f"{here.hashes[name]}; install the same version on each node"
            )
