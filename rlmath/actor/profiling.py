"""Profilers of a rank's process, for ``runner.profile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from rlmath.config.profile import ProfileTool

# Number of last allocations and frees to keep; a long step has more than fit into memory.
MAX_ALLOCATIONS = 1_000_000


@contextlib.contextmanager
def recording(tool: ProfileTool, folder: Path, rank: int) -> Iterator[None]:
    """Record this block, and write ``rank_0.json.gz`` or ``rank_0.pickle``, which appears
    atomically; Nsight Systems writes its own file."""
    if tool is ProfileTool.nsys:
        with torch.cuda.profiler.profile():  # type: ignore[no-untyped-call]
            yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (
        f"rank_{rank}.pickle" if tool is ProfileTool.memory else f"rank_{rank}.json.gz"
    )
    partial = file.with_name(f".{file.name}")
    if tool is ProfileTool.memory:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        try:
            yield
            torch.cuda.memory._dump_snapshot(str(partial))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    else:
        activities = torch.profiler.supported_activities()
        with torch.profiler.profile(activities=activities, profile_memory=True) as found:
            yield
        found.export_chrome_trace(str(partial))
    partial.replace(file)
