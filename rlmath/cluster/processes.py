"""Signals to processes of the run, on this node or another."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import psutil

# Ray answers within this even when it has to start a process on the other node first.
REMOTE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of the run is.

    Attributes:
        node_id: Ray's id of the node.
        pid: Its process id there.
        started_s: When it began, Unix time: a process id alone may have gone to another since.
    """

    node_id: str
    pid: int
    started_s: float


def own_place() -> ProcessPlace:
    """Of the calling process, a Ray worker."""
    import ray

    pid = os.getpid()
    started_s = psutil.Process(pid).create_time()
    return ProcessPlace(ray.get_runtime_context().get_node_id(), pid, started_s)


def kill(place: ProcessPlace) -> None:
    """End a process and its children with SIGKILL; nothing happens when it has ended already."""
    _on_its_node(place, signal.SIGKILL, True)


def send_signal(place: ProcessPlace, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    _on_its_node(place, number, False)


def _on_its_node(place: ProcessPlace, number: int, children: bool) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if place.node_id == ray.get_runtime_context().get_node_id():
        _signal(place, number, children)
        return
    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    task: Any = ray.remote(_signal).options(num_cpus=0, scheduling_strategy=strategy)
    # A node that is gone has taken its processes with it.
    with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        ray.get(task.remote(place, number, children), timeout=REMOTE_TIMEOUT_S)


def _signal(place: ProcessPlace, number: int, children: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(place.pid)
        if process.create_time() != place.started_s:
            return
        family = [process, *(process.children(recursive=True) if children else [])]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
