"""Worker processes that can be killed.

Each slot of the pool is a thread of the parent that owns one process and gives it one job at a
time. The thread counts the deadline from the moment it sends the job, kills the process group when
it passes, and starts another process; the other slots go on. No signal handler is installed, so the
pool works from any thread and inside Ray actors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlmath.grading.settings import GradingSettings
from rlmath.grading.worker import receive, send

_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlmath.grading.worker import main; main()"
)
_MAX_ATTEMPTS = 3


class WorkerDied(Exception):
    """The process ended, or was killed by someone else, before it answered."""


class WorkerTimeout(Exception):
    """The job ran past its deadline; the process group has been killed."""


class Worker:
    """One process, in a session of its own, without the parent's secrets."""

    def __init__(self, settings: GradingSettings) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *[p for p in sys.path if p and p != package_root]]
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment.update(
            PYTHONHASHSEED="0", LC_ALL="C.UTF-8", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"
        )
        self.settings = settings
        self.jobs = 0
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _PROGRAM, json.dumps(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
        self.pid = self.process.pid
        try:
            start = {
                "memory_limit_mib": settings.memory_limit_mib,
                "settings": dataclasses.asdict(settings),
            }
            self._exchange(start, settings.startup_timeout_s)
        except BaseException:
            self.kill()
            raise

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            send(self.process.stdin.fileno(), message)
            poller = select.poll()
            poller.register(self.process.stdout.fileno(), select.POLLIN | select.POLLHUP)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.kill()
                raise WorkerTimeout
            return receive(self.process.stdout.fileno())
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDied from error

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do one job.

        Raises:
            WorkerTimeout: it took longer than `timeout_s`.
            WorkerDied: the process is gone.
        """
        self.jobs += 1
        return self._exchange(job, self.settings.timeout_s)

    def kill(self) -> None:
        """Kill the process and all that it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@dataclasses.dataclass
class Result:
    """What came of a job: the worker's reply, `timeout` or `error`, and its run time."""

    reply: dict[str, Any]
    seconds: float


class WorkerPool:
    """`num_workers` processes behind one queue."""

    def __init__(self, settings: GradingSettings) -> None:
        self.settings = settings
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], Future[Result]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._workers: dict[int, Worker] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"grading-{slot}", daemon=True)
            for slot in range(settings.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: dict[str, Any]) -> Future[Result]:
        """Queue a job; its future always gets a result."""
        future: Future[Result] = Future()
        if self._closed.is_set():
            future.set_result(Result({"error": "the pool is closed"}, 0.0))
        else:
            self._queue.put((job, future))
        return future

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        with self._lock:
            return [worker.pid for worker in self._workers.values()]

    def close(self) -> None:
        """Kill the workers; jobs still queued end as errors."""
        self._closed.set()
        for _ in self._threads:
            self._queue.put(None)
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        while True:
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                break
            if entry is not None:
                entry[1].set_result(Result({"error": "the pool was closed"}, 0.0))

    # -- one slot

    def _serve(self, slot: int) -> None:
        self._ensure(slot)  # start before the first job needs it
        while True:
            entry = self._queue.get()
            if entry is None or self._closed.is_set():
                if entry is not None:
                    entry[1].set_result(Result({"error": "the pool was closed"}, 0.0))
                self._drop(slot)
                return
            job, future = entry
            try:
                future.set_result(self._do(slot, job))
            except Exception as error:  # the future must get an answer whatever happens
                future.set_result(Result({"error": f"{type(error).__name__}: {error}"}, 0.0))

    def _ensure(self, slot: int) -> Worker | None:
        with self._lock:
            worker = self._workers.get(slot)
        if worker is not None:
            if worker.jobs < self.settings.max_jobs_per_worker and worker.process.poll() is None:
                return worker
            self._drop(slot)
        try:
            worker = Worker(self.settings)
        except (WorkerDied, WorkerTimeout, OSError):
            return None
        with self._lock:
            self._workers[slot] = worker
        return worker

    def _drop(self, slot: int) -> None:
        with self._lock:
            worker = self._workers.pop(slot, None)
        if worker is not None:
            worker.kill()

    def _do(self, slot: int, job: dict[str, Any]) -> Result:
        """Run a job; a worker that someone else killed costs it a second attempt."""
        seconds = 0.0
        for _ in range(_MAX_ATTEMPTS):
            worker = self._ensure(slot)
            if worker is None:
                continue
            started = time.perf_counter()
            try:
                reply = worker.run(job)
            except WorkerTimeout:
                self._drop(slot)
                return Result({"timeout": True}, time.perf_counter() - started)
            except WorkerDied:
                self._drop(slot)
                seconds += time.perf_counter() - started
                if self._closed.is_set():
                    break
                continue
            return Result(reply, seconds + time.perf_counter() - started)
        return Result({"error": "worker processes died or did not start"}, seconds)
