"""Processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
# Loaded here, because a process that was just forked may not be able to.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, even if stopped or busy.

    Args:
        parent_pid: The parent's process id. If it has already ended, so does this process. For the
            kernel, the parent is the thread that started this process.

    No-op on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
