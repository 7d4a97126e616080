"""Resident memory of a process and all that it started."""

from __future__ import annotations

import os
from contextlib import suppress

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def tree_memory_mib(pid: int) -> float:
    """Sum over the tree below ``pid``, itself included, in MiB.

    Pages that processes share are counted for each of them. A process that ends meanwhile counts 0.
    """
    total = 0.0
    todo = [pid]
    seen: set[int] = set()
    while todo:
        process = todo.pop()
        if process in seen:
            continue
        seen.add(process)
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{process}/statm") as file:
                total += int(file.read().split()[1]) * _PAGE_MIB
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    todo += [int(child) for child in file.read().split()]
    return total
