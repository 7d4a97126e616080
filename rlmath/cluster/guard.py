"""Ends what Ray leaves behind when its driver has ended, however that was.

Ray's head and its node end with the driver by the kernel's hand, ranks and engines with those.
Ray's agents do not: they try for a minute to tell the dead head of their node's death. So a run
that starts a Ray of its own starts this beside it: a small process that waits for the driver's end
and then kills each process that carries the session's mark in its environment.

It runs as a script that needs the standard library alone: ``guard.py MARK DRIVER_PID``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

# In the environment of Ray's processes and of all that they start.
VARIABLE = "RLMATH_RAY_SESSION"
POLL_S = 0.2
# A process that is killed ends at once, unless it waits for a device.
END_TIMEOUT_S = 5.0


class Guard:
    """The driver's handle on the process.

    Attributes:
        mark: What processes have to carry in ``VARIABLE``.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # In a session of its own: what ends the run must not end it first.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Kill now what carries the mark; returns when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * END_TIMEOUT_S)


def main(mark: str, driver_pid: int) -> None:
    """Wait until standard input closes or the driver ends, and kill."""
    # A child that the driver forked may hold the other end of the pipe for longer than the driver.
    while os.getppid() == driver_pid and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := carrying(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def carrying(mark: str) -> list[int]:
    """Processes of this user that carry a mark."""
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and entry in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
