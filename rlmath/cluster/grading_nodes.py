"""Grading workers on the engines' nodes of the Ray cluster instead of the driver's.

Each node has one actor, which owns a ``WorkerPool`` there: the same processes under the same limits
of memory, time, files and further processes as on the driver. Losing a node costs no grade: its
jobs go to the other nodes, and from the last one to a pool on the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlmath.grading.pool import CLOSED, MAX_ATTEMPTS, NO_WORKER, Result, WorkerPool
from rlmath.grading.settings import MOST_WORKERS, GradingSettings, workers_for
from rlmath.utils.child_processes import end_with_parent

# How often the actor of a node is restarted.
MAX_RESTARTS = 3

log = logging.getLogger(__name__)


class GradingNode:
    """One node's workers, in a separate Ray actor."""

    def __init__(self, settings: GradingSettings, num_workers: int | None) -> None:
        end_with_parent(os.getppid())
        self._count = num_workers or workers_for(len(os.sched_getaffinity(0)))
        self._pool = WorkerPool(dataclasses.replace(settings, num_workers=self._count))

    def workers(self) -> int:
        return self._count

    def do(self, job: dict[str, Any]) -> Result:
        return self._pool.submit(job).result()


@dataclasses.dataclass
class _Node:
    node_id: str
    actor: Any  # Its handle; None: the node is lost.
    restarts: int = 0  # Number of restarts of the actor.
    refused: int = 0  # Consecutive jobs for which the node had no worker.
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass
class _Job:
    job: dict[str, Any]
    future: Future[Result]
    failed: int = 0


class NodeWorkers:
    """A ``WorkerPool`` whose workers are on other nodes. ``num_workers``: workers per node;
    ``None``: a quarter of its cores. ``done``: jobs done so far, by node."""

    def __init__(
        self, settings: GradingSettings, node_ids: Sequence[str], num_workers: int | None
    ) -> None:
        self._settings, self._num_workers = settings, num_workers
        self._patience_s = MAX_ATTEMPTS * (settings.timeout_s + settings.startup_timeout_s)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The driver's workers, where they are needed.
        self._own: WorkerPool | None = None
        self._serves_here = False
        self._threads: list[threading.Thread] = []
        self.done: Counter[str] = Counter()
        self._nodes = [_Node(node_id, self._start(node_id)) for node_id in node_ids]
        for node in self._nodes:
            workers = self._wait(node)
            for _ in range(workers):
                self._run(self._serve, node)
        self._leave()

    def submit(self, job: dict[str, Any]) -> Future[Result]:
        future: Future[Result] = Future()
        if self._closed.is_set():
            future.set_result(Result({"error": CLOSED}, 0.0))
        else:
            self._queue.put(_Job(job, future))
        return future

    def pids(self) -> list[int]:
        with self._lock:
            return [] if self._own is None else self._own.pids()

    def close(self) -> None:
        """End the workers; jobs that run or wait end as errors."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            own = self._own
        for _ in self._threads:
            self._queue.put(None)
        for node in self._nodes:
            actor, node.actor = node.actor, None
            _kill(actor)
        if own is not None:
            own.close()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._queue.get_nowait()
                if entry is not None:
                    entry.future.set_result(Result({"error": CLOSED}, 0.0))

    # -- nodes

    def _start(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # A thread for each worker, and one that asks for their number.
        threads = (self._num_workers or MOST_WORKERS) + 1
        return (
            ray.remote(GradingNode)
            .options(
                num_cpus=0,
                max_concurrency=threads,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._settings, self._num_workers)
        )

    def _wait(self, node: _Node) -> int:
        """Wait for the node's workers and return their number; 0: the node is lost."""
        import ray

        timeout_s = self._settings.startup_timeout_s
        try:
            return int(ray.get(node.actor.workers.remote(), timeout=timeout_s))
        except Exception as error:
            self._lose(node, error)
            return 0

    def _lose(self, node: _Node, error: Exception) -> None:
        from ray.exceptions import RayError

        from rlmath.cluster.failures import describe_failure

        if not self._closed.is_set():
            reason = describe_failure(error) if isinstance(error, RayError) else repr(error)
            log.warning("lost the grading workers of node %s: %s", node.node_id, reason)
        actor, node.actor, node.refused = node.actor, None, 0
        _kill(actor)

    def _revive(self, node: _Node) -> bool:
        """Restart a node's actor and return whether it is alive. One thread restarts it while the
        others wait."""
        with node.lock:
            if node.actor is not None:
                return True
            if self._closed.is_set() or node.restarts >= MAX_RESTARTS:
                return False
            node.restarts += 1
            try:
                node.actor = self._start(node.node_id)
            except Exception as error:
                log.warning("node %s: %s", node.node_id, error)
            if node.actor is not None and self._wait(node):
                log.warning("node %s has grading workers again", node.node_id)
                return True
            node.restarts = MAX_RESTARTS
            return False

    # -- jobs

    def _run(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, name="grading-node", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, node: _Node) -> None:
        """Do jobs of the queue as one worker while its node is alive."""
        while not self._closed.is_set():
            entry = self._queue.get()
            if entry is None:
                return
            result = self._run_job(node, entry.job)
            if result is None:
                self._again(entry)
            elif result.reply.get("error") in (NO_WORKER, CLOSED):
                self._give_back(node, entry)
            else:
                node.refused = 0
                entry.future.set_result(result)
            if node.actor is None and not self._revive(node):
                self._leave()
                return

    def _run_job(self, node: _Node, job: dict[str, Any]) -> Result | None:
        """The result of a job; ``None``: there is none, as the actor is lost."""
        import ray

        with node.lock:
            actor = node.actor
        if actor is None:
            return None
        try:
            result: Result = ray.get(actor.do.remote(job), timeout=self._patience_s)
        except Exception as error:
            with node.lock:
                if node.actor is actor:
                    self._lose(node, error)
            return None
        if "error" not in result.reply:
            with self._lock:
                self.done[node.node_id] += 1
        return result

    def _give_back(self, node: _Node, entry: _Job) -> None:
        """Give back a job for which a node has no worker: the processes of a node that is ending
        may be gone before its actor. After a few refusals in a row the node gets no more jobs;
        otherwise it would take them faster than the nodes that do them.
        """
        with node.lock:
            node.refused += 1
            if node.refused >= MAX_ATTEMPTS and node.actor is not None:
                self._lose(node, RuntimeError("its worker processes do not start"))
        if self._closed.is_set():
            self._do_here(entry)
        else:
            self._queue.put(entry)

    def _again(self, entry: _Job) -> None:
        """Let another node do a job, or the driver after too many failures."""
        entry.failed += 1
        if entry.failed < MAX_ATTEMPTS and not self._closed.is_set():
            self._queue.put(entry)
        else:
            self._do_here(entry)

    def _leave(self) -> None:
        """End one thread of a node; the last node's last thread leaves the jobs to the driver."""
        with self._lock:
            ends = self._serves_here or any(node.actor is not None for node in self._nodes)
            self._serves_here = True if not ends else self._serves_here
        if not ends and not self._closed.is_set():
            log.warning("no node has grading workers any more: answers are graded on the driver")
            self._run(self._serve_here)

    def _serve_here(self) -> None:
        while not self._closed.is_set():
            entry = self._queue.get()
            if entry is None:
                return
            self._do_here(entry)

    def _do_here(self, entry: _Job) -> None:
        with self._lock:
            if self._closed.is_set():
                entry.future.set_result(Result({"error": CLOSED}, 0.0))
                return
            if self._own is None:
                self._own = WorkerPool(self._settings)
            own = self._own
        own.submit(entry.job).add_done_callback(lambda done: entry.future.set_result(done.result()))


def _kill(actor: Any) -> None:
    """End an actor, unless Ray has ended: ``ray.kill`` would start it again."""
    import ray

    if actor is not None and ray.is_initialized():
        with contextlib.suppress(Exception):
            ray.kill(actor)


def node_workers(
    settings: GradingSettings, engines: Sequence[Any], num_workers: int | None
) -> NodeWorkers:
    import ray

    places = ray.get([engine.place.remote() for engine in engines])
    node_ids = list(dict.fromkeys(place.node_id for place in places))
    return NodeWorkers(settings, node_ids, num_workers)
