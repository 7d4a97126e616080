"""Processes that must not outlive the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
# Opened here, as a process that was just forked may not be able to.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; also one that is stopped or busy.

    Args:
        parent_pid: The parent's process id. If it has ended already, so does this process. The
            kernel takes the thread that started this process for its parent.

    Nothing happens where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
