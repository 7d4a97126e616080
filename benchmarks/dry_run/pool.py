"""Counts jobs in separate processes, several side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.dry_run.jobs import Job, PhaseCount, RankCount
from rlmath.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class DryRunFailed(UserError):
    """A rank could not be built or run; the message has its traceback."""


class Pool:
    """Processes that count. A context manager; they start when they are first needed.

    Args:
        processes: How many; each imports torch and Megatron, which takes seconds.
    """

    def __init__(self, processes: int = 1) -> None:
        self._free: SimpleQueue[_Process] = SimpleQueue()
        self._all = [_Process() for _ in range(processes)]
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(processes)

    def count(self, jobs: Sequence[Job]) -> list[RankCount]:
        """Count each, in order.

        Raises:
            DryRunFailed: One could not be built or run.
        """
        return list(self._threads.map(self._count, jobs))

    def _count(self, job: Job) -> RankCount:
        process = self._free.get()
        try:
            return process.count(job)
        finally:
            self._free.put(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()


class _Process:
    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def count(self, job: Job) -> RankCount:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.dry_run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise DryRunFailed(f"{job.name}: the process that counts ended ({process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DryRunFailed(f"{job.name}, rank {job.rank}: {answer['error']}")
        phases = {name: PhaseCount(**one) for name, one in answer["phases"].items()}
        return RankCount(job, phases, answer["in_flight"], answer["parameters"], answer["seconds"])

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)
