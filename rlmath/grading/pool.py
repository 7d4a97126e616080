"""Worker processes that can be killed.

Each slot of the pool is a thread of the parent that owns one process and gives it one job at a
time. The thread counts the deadline from when it sends the job, kills the process group when the
deadline passes, and forks another process; the other slots continue. No signal handler is
installed, so the pool works from any thread and inside Ray actors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any, Protocol

from rlmath.grading.forkserver import ForkServer, ForkServerDied
from rlmath.grading.settings import GradingSettings
from rlmath.grading.worker import receive, send

# Number of attempts for a job whose worker dies.
MAX_ATTEMPTS = 3
# Errors that do not depend on the job.
NO_WORKER = "worker processes died or could not be started"
CLOSED = "the pool is closed"


class WorkerDied(Exception):
    """The process ended, or was killed by someone else, before it replied."""


class WorkerTimeout(Exception):
    """The job ran past its deadline."""


class Worker:
    """One process, in its own process group. Raises ForkServerDied: the fork server is gone."""

    def __init__(self, server: ForkServer, settings: GradingSettings) -> None:
        self.server = server
        self.timeout_s = settings.timeout_s
        self.jobs = 0
        theirs_in, self._requests = Pipe(duplex=False)
        self._replies, theirs_out = Pipe(duplex=False)
        try:
            self.pid = server.fork(theirs_in.fileno(), theirs_out.fileno())
        except ForkServerDied:
            self._close_pipes()
            raise
        finally:
            theirs_in.close()
            theirs_out.close()

    def _close_pipes(self) -> None:
        self._requests.close()
        self._replies.close()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job. Raises WorkerTimeout: it took longer than `timeout_s`; WorkerDied: the
        process is gone."""
        self.jobs += 1
        deadline = time.monotonic() + self.timeout_s
        try:
            send(self._requests, job)
            if not self._replies.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerTimeout
            return receive(self._replies)
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDied from error

    def kill(self) -> None:
        """Kill the process group and release the process id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._close_pipes()
        with contextlib.suppress(ForkServerDied):
            self.server.reap(self.pid)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Result of a job: the worker's reply, `timeout` or `error`, and its run time."""

    reply: dict[str, Any]
    seconds: float


class Workers(Protocol):
    """Executor of jobs: a `WorkerPool`, or one whose processes are on other machines."""

    def submit(self, job: dict[str, Any]) -> Future[Result]:
        """Queue a job; its future always gets a result."""

    def pids(self) -> list[int]:
        """Process ids of the workers on this machine."""

    def close(self) -> None:
        """Stop the workers; running and queued jobs fail."""


_Entry = tuple[dict[str, Any], Future[Result]] | None


def _refuse(entry: _Entry) -> None:
    if entry is not None:
        entry[1].set_result(Result({"error": CLOSED}, 0.0))


class WorkerPool:
    """`num_workers` processes behind one queue."""

    def __init__(self, settings: GradingSettings) -> None:
        self.settings = settings
        self._queue: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._server_lock = threading.Lock()
        self._server: ForkServer | None = None
        self._workers: dict[int, Worker] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"grading-{slot}", daemon=True)
            for slot in range(settings.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: dict[str, Any]) -> Future[Result]:
        future: Future[Result] = Future()
        if self._closed.is_set():
            _refuse((job, future))
        else:
            self._queue.put((job, future))
        return future

    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._workers.values()]

    def close(self) -> None:
        """Kill the workers; running and queued jobs fail."""
        self._closed.set()
        for _ in self._threads:
            self._queue.put(None)
        with self._lock:
            for worker in self._workers.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        with self._server_lock:
            if self._server is not None:
                self._server.close()
                self._server = None
        with contextlib.suppress(queue.Empty):
            while True:
                _refuse(self._queue.get_nowait())

    # -- one slot

    def _serve(self, slot: int) -> None:
        self._ensure(slot)  # start before the first job needs it
        while True:
            entry = self._queue.get()
            if entry is None or self._closed.is_set():
                _refuse(entry)
                self._drop(slot)
                return
            job, future = entry
            try:
                future.set_result(self._do(slot, job))
            except Exception as error:  # the future must get an answer whatever happens
                future.set_result(Result({"error": f"{type(error).__name__}: {error}"}, 0.0))
            if not self._closed.is_set():
                self._ensure(slot)  # replace a worker that was killed before it is needed

    def _fork_server(self) -> ForkServer:
        with self._server_lock:
            if self._closed.is_set():
                raise ForkServerDied
            if self._server is None:
                self._server = ForkServer(self.settings)
            return self._server

    def _forget_server(self, server: ForkServer | None) -> None:
        with self._server_lock:
            if server is not None and self._server is server:
                server.close()
                self._server = None

    def _ensure(self, slot: int) -> Worker | None:
        """The worker of a slot, replaced if used up; None if none can be started."""
        with self._lock:
            worker = self._workers.get(slot)
        if worker is not None:
            if worker.jobs < self.settings.max_jobs_per_worker:
                return worker
            self._drop(slot)
        server = None
        try:
            server = self._fork_server()
            worker = Worker(server, self.settings)
        except ForkServerDied:
            self._forget_server(server)
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
        """Run a job, with another attempt if someone else killed the worker."""
        for _ in range(MAX_ATTEMPTS):
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
                if self._closed.is_set():
                    break
                continue
            seconds = time.perf_counter() - started
            if reply.get("error") == "out of memory":
                self._drop(slot)
            return Result(reply, seconds)
        return Result({"error": NO_WORKER}, 0.0)
