from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def process_tree(pid: int) -> list[int]:
    """``pid`` and its running descendants."""
    found: dict[int, None] = {}
    todo = [pid]
    while todo:
        process = todo.pop()
        if process in found:
            continue
        found[process] = None
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    todo += [int(child) for child in file.read().split()]
    return list(found)


def tree_memory_mib(processes: Iterable[int]) -> float:
    """Resident memory of processes, in MiB.

    Shared pages are counted for each process. A process that ends meanwhile counts 0.
    """
    total = 0.0
    for process in processes:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/statm") as file:
            total += int(file.read().split()[1]) * _PAGE_MIB
    return total
