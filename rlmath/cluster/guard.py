"""Ends the processes that Ray leaves behind, however its driver ended.

The kernel ends Ray's head and node with the driver, and ranks and engines with those. Ray's agents
outlive them: they try for a minute to report their node's death to the dead head. So a run that
starts its own Ray also starts this small process, which waits for the driver's end and then kills
the process groups that it was given.

It runs as a script that needs the standard library alone: ``guard.py DRIVER_PID``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable

POLL_S = 0.2
END_TIMEOUT_S = 5.0


class Guard:
    """The driver's handle on the guarding process."""

    def __init__(self) -> None:
        # In its own session, so that a signal to the run does not end it first.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Add process groups that end with the driver."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{group}\n" for group in groups).encode())
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)


def main(driver_pid: int) -> None:
    """Take groups from standard input until it closes or the driver ends, and kill them."""
    # A signal to every process of the run is not for this one, which ends the others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    told, closed = b"", False
    while not closed:
        # A child that the driver forked may hold the other end of the pipe for longer than it.
        ended = os.getppid() != driver_pid
        if select.select([0], [], [], 0.0 if ended else POLL_S)[0]:
            piece = os.read(0, 4096)
            told += piece
            closed = not piece
        elif ended:
            break
    for group in told.split():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
