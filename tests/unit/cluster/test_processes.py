"""A process of the run is known again when the clock was set, and no other is taken for it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlmath.cluster import processes

pytestmark = pytest.mark.process


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a process that only waits."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: process.pid)
            found = processes.own_place()
        yield found
        process.kill()


def test_a_clock_that_was_set_changes_nothing(
    place: processes.ProcessPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix times of starts move with it, as psutil adds the time of boot."""
    begun, boot = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun(self) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 3600)
    processes.send_signal(place, signal.SIGKILL)
    assert psutil.Process(place.pid).wait(10) == -signal.SIGKILL


def test_another_process_with_the_same_id_is_left_alone(place: processes.ProcessPlace) -> None:
    earlier = dataclasses.replace(place, started_s=place.started_s - 30)
    processes.send_signal(earlier, signal.SIGKILL)
    processes.kill(earlier)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(place.pid).wait(0.5)
