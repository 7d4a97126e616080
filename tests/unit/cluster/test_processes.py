"""A process of the run is known again when the clock was set, and no other is taken for it."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from rlmath.cluster import processes

pytestmark = pytest.mark.process


@pytest.fixture
def place(monkeypatch):
    """Location of a process that only waits."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: process.pid)
            found = processes.own_place()
        yield found
        process.kill()


def test_a_clock_that_was_set_changes_nothing(place, monkeypatch):
    """Unix times of starts move with it, as psutil adds the time of boot."""
    begun, boot = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun(self) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 3600)
    processes.send_signal([place], signal.SIGKILL)
    assert psutil.Process(place.pid).wait(10) == -signal.SIGKILL


def test_another_process_with_the_same_id_is_left_alone(place):
    earlier = dataclasses.replace(place, started_s=place.started_s - 30)
    processes.send_signal([earlier], signal.SIGKILL)
    processes.end_actors([None], [earlier])
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(place.pid).wait(0.5)


def test_children_on_another_node_are_ended_before_the_actor_that_leads_to_them(monkeypatch):
    """Ray's kill ends the actor's process alone; a task that looks for its children afterwards
    finds no process. One task ends all of a node."""
    events = []
    monkeypatch.setattr(
        "ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here")
    )
    monkeypatch.setattr("ray.kill", lambda actor, no_restart: events.append(actor))
    monkeypatch.setattr(
        processes,
        "_on_their_node",
        lambda places, number, children: events.append(([p.pid for p in places], children)),
    )
    there = [processes.ProcessPlace("there", pid, 0.0) for pid in (1, 2)]
    processes.end_actors(["a", "b"], there, have_children=True)
    assert events == [([1, 2], True), "a", "b"]
    events.clear()
    # One that has no children, or whose place is not known, is Ray's to end.
    processes.end_actors(["a", "b"], there)
    processes.end_actors(["c"], [None], have_children=True)
    assert events == ["a", "b", "c"]


def test_nodes_that_do_not_answer_are_waited_for_together(monkeypatch):
    """Else a watchdog's report on hundreds of processes takes hours where a disk hangs."""
    together = threading.Barrier(3, timeout=10)
    asked = []

    def on_their_node(places, number, children):
        asked.append([place.pid for place in places])
        together.wait()

    monkeypatch.setattr(processes, "_on_their_node", on_their_node)
    places = [processes.ProcessPlace(f"node {pid % 3}", pid, 0.0) for pid in range(6)]
    processes.send_signal(places, signal.SIGUSR2)
    assert sorted(asked) == [[0, 3], [1, 4], [2, 5]]


def test_a_stopped_child_is_ended_with_its_parent(monkeypatch):
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    command = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent.pid)
            place = processes.own_place()
        processes.end_actors([None], [place])
        assert parent.wait(10) == -signal.SIGKILL
        assert psutil.wait_procs([child], timeout=10)[1] == []
