"""The guard kills the groups that it was told of, however the driver ends, and nothing else."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from rlmath.cluster.guard import Guard

pytestmark = pytest.mark.process

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
DRIVER = f"""
import os, subprocess, time
from rlmath.cluster.guard import Guard
guard = Guard()
left = subprocess.Popen({SLEEP!r}, process_group=0)
guard.watch([left.pid])
# Holds the guard's pipe for longer than the driver lives.
if os.fork() == 0:
    time.sleep(60)
print(left.pid, guard._process.pid, flush=True)
time.sleep(60)
"""


def test_closing_the_guard_ends_its_process_groups():
    guard = Guard()
    told, other = (subprocess.Popen(SLEEP, process_group=0) for _ in range(2))
    guard.watch([told.pid])
    guard.close()
    assert told.wait(timeout=5) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_guard_outlives_the_driver_and_ends_its_processes(number):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    ) as driver:
        assert driver.stdout is not None
        watched = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        forked = [p for p in psutil.Process(driver.pid).children() if p not in watched]
        # To its whole group, as a terminal does; -9 to the driver alone.
        (os.killpg if number is signal.SIGTERM else os.kill)(driver.pid, number)
        driver.stdout.close()
    _, alive = psutil.wait_procs(watched, timeout=5)
    assert not alive
    for one in forked:
        if one.is_running():
            one.kill()
