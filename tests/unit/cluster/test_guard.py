"""The guard kills what carries its mark, however the driver ends, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from rlmath.cluster.guard import VARIABLE, Guard, carrying

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
DRIVER = f"""
import os, subprocess, sys, time
from rlmath.cluster.guard import VARIABLE, Guard
guard = Guard()
subprocess.Popen({SLEEP!r}, env={{VARIABLE: guard.mark}}, start_new_session=True)
# Holds the guard's pipe for longer than the driver lives.
if os.fork() == 0:
    time.sleep(60)
print(guard.mark, flush=True)
time.sleep(60)
"""


def test_closing_it_ends_what_carries_the_mark() -> None:
    guard = Guard()
    marked = subprocess.Popen(SLEEP, env={VARIABLE: guard.mark})
    other = subprocess.Popen(SLEEP, env={VARIABLE: "another"})
    deadline = time.monotonic() + 10
    while carrying(guard.mark) != [marked.pid] and time.monotonic() < deadline:
        time.sleep(0.01)
    guard.close()
    assert marked.wait(timeout=1) == -9
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
def test_it_outlives_a_killed_driver_to_end_what_that_left(signal: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        mark = driver.stdout.readline().strip()
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(carrying(mark)) == 1
        if signal == "TERM":
            os.killpg(driver.pid, 15)
        else:
            driver.kill()
        driver.stdout.close()
    _, alive = psutil.wait_procs([one for one in family if not forked(one)], timeout=5)
    assert not alive and not carrying(mark)
    for one in family:
        if one.is_running() and forked(one):
            one.kill()


def forked(process: psutil.Process) -> bool:
    """The driver's own child, which nobody has asked to end."""
    try:
        return "os.fork()" in " ".join(process.cmdline())
    except psutil.Error:
        return False
