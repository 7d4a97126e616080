"""Calls of the Python tool: how long a warm one takes, and how many the driver handles at once.

    python benchmarks/tools.py [--calls 300] [--threads 32] [--seconds 5]

Printed first: milliseconds of a call whose code is `1`, one call at a time, so all of it is
overhead; in new sandboxes, in warm ones, and in a session. Then calls per second of all threads,
in real sandboxes, and against stubs in another process that answer at once, so that only the
driver works. What to look at: the median of warm calls, the stubs' calls per second, and the
driver's own time for each call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.process
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable

from rlmath.environments.python_tool import PythonTool
from rlmath.rewards.sandbox import CodeProvider, Limits, PreparedProgram, Program
from rlmath.rewards.sandbox.cell_protocol import REPLY, REQUEST
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rewards.sandbox.warm import Sandbox

LIMITS = Limits(cpu_s=5, wall_s=5.0)


class _Cold(CodeProvider):
    """The local provider without warm sandboxes."""

    def __init__(self) -> None:
        self._local = LocalProvider()

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        return self._local.prepare(program, limits)


def latency(run: Callable[[], object], calls: int) -> str:
    """Median and 90th percentile of one call at a time, in ms."""
    run()
    found = []
    for _ in range(calls):
        begun = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - begun))
        time.sleep(0.005)  # a new cell is forked after a call
    return (
        f"median {statistics.median(found):6.2f}  p90 {statistics.quantiles(found, n=10)[8]:6.2f}"
    )


def throughput(tool: PythonTool, threads: int, seconds: float) -> str:
    """Calls per second of all threads, and the driver's CPU time for each."""
    counts = [0] * threads
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < until:
            assert tool.run("1").text == "1\n"
            counts[number] += 1

    tool.run("1")
    begun, used = time.monotonic(), time.process_time()
    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    took, cpu_s = time.monotonic() - begun, time.process_time() - used
    total = sum(counts)
    return f"{total / took:8.0f} calls/s, {1000 * cpu_s / total:.3f} ms of the driver for each"


def _answer(links: list[socket.socket]) -> None:
    """Be all stubs: answer each request at once."""
    reply = REPLY.pack(0, False, 0, 0.0, 2) + b"1\n" + b"\x01"
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                request = os.read(key.fd, 65536)
                if not request:
                    return
                assert len(request) == REQUEST.size + 1
                os.write(key.fd, reply)


def stubs(tool: PythonTool, count: int) -> multiprocessing.process.BaseProcess:
    """Give the tool's pool stubs for sandboxes; returns their process."""
    pairs = [socket.socketpair() for _ in range(count)]
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=([theirs for _, theirs in pairs],), daemon=True
    )
    process.start()
    free = [Sandbox(link, LIMITS) for link, _ in pairs]
    assert tool.pool is not None
    tool.pool._idle.clear()
    tool.pool._count = 0
    tool.pool._start = free.pop  # type: ignore[method-assign]
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args()
    print("one call at a time, ms")
    cold = PythonTool(_Cold(), LIMITS)
    print("  new sandboxes ", latency(lambda: cold.run("1"), max(10, chosen.calls // 10)))
    warm = PythonTool(LocalProvider(), LIMITS, most=chosen.threads)
    print("  warm sandboxes", latency(lambda: warm.run("1"), chosen.calls))
    kept = PythonTool(LocalProvider(), LIMITS, session=True)
    session = kept.begin()
    print("  a session     ", latency(lambda: session.call({"code": "1"}), chosen.calls))
    kept.close()
    print(f"{chosen.threads} threads on {os.cpu_count()} cores")
    print("  real sandboxes", throughput(warm, chosen.threads, chosen.seconds))
    warm.close()
    stubbed = PythonTool(LocalProvider(), LIMITS, ahead=0, most=chosen.threads)
    process = stubs(stubbed, chosen.threads)
    print("  stubs         ", throughput(stubbed, chosen.threads, chosen.seconds))
    process.kill()


if __name__ == "__main__":
    main()
