"""Signals to processes of the run, on this node or another."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

# Ray answers within this even when it has to start a process on the other node first.
REMOTE_TIMEOUT_S = 20.0
# Without its head node Ray would wait much longer for a useless answer.
END_TIMEOUT_S = 3.0
# A process may have to be started on the other node that ends children there.
END_CHILDREN_TIMEOUT_S = 10.0
# The time of boot is known to a second, and the clock may be set between two looks at it.
SAME_START_S = 1.5


@dataclass(frozen=True)
class ProcessPlace:
    node_id: str  # Ray's id of the node.
    pid: int
    # Its start, in seconds since the node booted: the process id may have been reused since, and
    # Unix time moves when the clock is set.
    started_s: float


def own_place() -> ProcessPlace:
    """The place of the calling process, a Ray worker."""
    import ray

    pid = os.getpid()
    return ProcessPlace(ray.get_runtime_context().get_node_id(), pid, _started_s(pid))


def _started_s(pid: int) -> float:
    """Seconds from the boot of the node to the start of a process. Raises psutil.NoSuchProcess:
    there is none."""
    # psutil adds the time of boot; setting the clock changes both alike.
    return psutil.Process(pid).create_time() - psutil.boot_time()


def end_actors(
    actors: Sequence[Any], places: Sequence[ProcessPlace | None], *, have_children: bool = False
) -> None:
    """End Ray actors at once, whatever state they and Ray are in.

    Args:
        places: Their places where known; those on this node are ended without Ray, which cannot
            end stopped actors, nor any after its own signal to end.
        have_children: Their processes have children, which are ended first: once an actor's
            process is gone, nothing leads to a child that is stopped or waits in a kernel.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    elsewhere: dict[str, list[tuple[Any, ProcessPlace]]] = {}
    unknown = []
    for actor, place in zip(actors, places, strict=True):
        if place is None or (place.node_id != here and not have_children):
            unknown.append(actor)
        elif place.node_id == here:
            _signal([place], signal.SIGKILL, True)
        else:
            elsewhere.setdefault(place.node_id, []).append((actor, place))

    def by_ray(of_node: Sequence[tuple[Any, ProcessPlace]]) -> None:
        if of_node:
            _on_their_node([place for _, place in of_node], signal.SIGKILL, True)
        for actor in [actor for actor, _ in of_node] or unknown:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)

    threads = [
        threading.Thread(target=by_ray, args=(of_node,), name="end-actors", daemon=True)
        for of_node in [*elsewhere.values(), *([[]] if unknown else [])]
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + (END_CHILDREN_TIMEOUT_S if elsewhere else END_TIMEOUT_S)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def send_signal(places: Sequence[ProcessPlace], number: signal.Signals) -> None:
    """Send a signal to processes that are still there, on all nodes at once: one that does not
    answer takes ``REMOTE_TIMEOUT_S``."""
    by_node: dict[str, list[ProcessPlace]] = {}
    for place in places:
        by_node.setdefault(place.node_id, []).append(place)
    threads = [
        threading.Thread(target=_on_their_node, args=(of_node, number, False), daemon=True)
        for of_node in by_node.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _on_their_node(places: Sequence[ProcessPlace], number: int, children: bool) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    (node,) = {place.node_id for place in places}
    if node == ray.get_runtime_context().get_node_id():
        _signal(places, number, children)
        return
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(_signal).options(num_cpus=0, scheduling_strategy=strategy)
    # A node that is gone has taken its processes with it.
    with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        ray.get(task.remote(places, number, children), timeout=REMOTE_TIMEOUT_S)


def _signal(places: Sequence[ProcessPlace], number: int, children: bool) -> None:
    for place in places:
        with contextlib.suppress(psutil.NoSuchProcess):
            if abs(_started_s(place.pid) - place.started_s) > SAME_START_S:
                continue
            process = psutil.Process(place.pid)
            if children:
                process.suspend()  # It starts no more of them.
            family = [*(process.children(recursive=True) if children else []), process]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
