"""Signals to processes of the run, on this node or another."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

# Ray answers within this even when it has to start a process on the other node first.
REMOTE_TIMEOUT_S = 20.0
# Without its head Ray waits much longer for an answer that nobody needs.
END_TIMEOUT_S = 3.0
# The time of boot is known to a second, and the clock may be set between two looks at it.
SAME_START_S = 1.5


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of the run is.

    Attributes:
        node_id: Ray's id of the node.
        pid: Its process id there.
        started_s: When it began, in seconds since the node booted: a process id alone may have gone
            to another since, and Unix time moves when the clock is set.
    """

    node_id: str
    pid: int
    started_s: float


def own_place() -> ProcessPlace:
    """Of the calling process, a Ray worker."""
    import ray

    pid = os.getpid()
    return ProcessPlace(ray.get_runtime_context().get_node_id(), pid, _started_s(pid))


def _started_s(pid: int) -> float:
    """Seconds from the boot of the node to the start of a process.

    Raises:
        psutil.NoSuchProcess: There is none.
    """
    # What psutil adds to it, of which a clock that is set changes both alike.
    return psutil.Process(pid).create_time() - psutil.boot_time()


def kill(place: ProcessPlace) -> None:
    """End a process and its children with SIGKILL; nothing happens when it has ended already."""
    _on_its_node(place, signal.SIGKILL, True)


def end_actors(actors: Sequence[Any], places: Sequence[ProcessPlace | None]) -> None:
    """End Ray actors at once, whatever state they and Ray are in.

    Args:
        actors: Their handles.
        places: Of each, if it is known; on this node they are ended without Ray, which cannot do
            it when they are stopped, or when it has been told to end itself.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    left = []
    for actor, place in zip(actors, places, strict=True):
        if place is not None and place.node_id == here:
            _signal(place, signal.SIGKILL, True)
        else:
            left.append(actor)
    if not left:
        return

    def by_ray() -> None:
        for actor in left:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)

    thread = threading.Thread(target=by_ray, name="end-actors", daemon=True)
    thread.start()
    thread.join(END_TIMEOUT_S)


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
        if abs(_started_s(place.pid) - place.started_s) > SAME_START_S:
            return
        process = psutil.Process(place.pid)
        family = [process, *(process.children(recursive=True) if children else [])]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
