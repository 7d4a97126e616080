"""Real Megatron ranks for tests: processes that stay for a module, forked from one that has
imported torch and Megatron for all modules.

``pool.run(layout, function, *args)`` runs ``function(layout, platform, *args)`` on each rank of a
layout, with the process groups up, and gives the results in order of rank.
"""

import contextlib
import multiprocessing as mp
import traceback
from multiprocessing.connection import Connection

from rlmath.actor.parallel import destroy, initialize
from rlmath.device import CPU
from rlmath.validation.processes import free_port

MAX_RANKS = 4
RUN_TIMEOUT_S = 300.0


def rank_context():
    """Starts ranks. Imports take most of a rank's start: the fork server does them once for all."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.rank_imports"])
    return context


def _serve(rank, pipe):
    CPU.prepare_megatron_process(rank, num_threads=1)
    while (job := pipe.recv()) is not None:
        layout, port, function, args = job
        try:
            initialize(layout, CPU, rank, "127.0.0.1", port, seed=0, timeout_s=RUN_TIMEOUT_S)
            try:
                pipe.send(("ok", function(layout, CPU, *args)))
            finally:
                destroy()
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class RankPool:
    """Processes that act as ranks of any layout of up to ``MAX_RANKS``."""

    def __init__(self, timeout_s=RUN_TIMEOUT_S):
        self._timeout_s = timeout_s
        context = rank_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, layout, function, *args):
        """Run on each rank of ``layout``; raises with the traceback of the first rank to fail."""
        port = free_port()
        ranks = self._pipes[: layout.world_size]
        for pipe in ranks:
            pipe.send((layout, port, function, args))
        results = []
        failures = []
        for rank, pipe in enumerate(ranks):
            if not pipe.poll(self._timeout_s):
                raise TimeoutError(f"rank {rank} of {layout} said nothing for {self._timeout_s} s")
            status, value = pipe.recv()
            (results if status == "ok" else failures).append(value)
        if failures:
            raise RuntimeError(f"{layout}:\n" + "\n".join(failures))
        return results

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # That rank has died before.
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
