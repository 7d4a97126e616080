"""Samples scored by a reward server, beside one blocking call per sample.

    python benchmarks/remote_reward.py [--samples 8192] [--latency-s 1.0]

A server in its own process takes ``--latency-s`` for each call, whatever is in it, and answers
any number of calls at once. Printed: seconds from the first sample to the last value through the
collector of a run, for one completion per call and for batches; and, computed from the latency,
what threads that each wait for one completion take. What to look at: the ratio in the last column.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

import numpy as np

from rlmath.rewards import RewardMix
from rlmath.rollout.collect import Collector
from rlmath.types import Problem, Sample

GROUP_SIZE = 16
# Threads of the collector, by default.
THREADS = 4


class _Judge(BaseHTTPRequestHandler):
    latency_s = 1.0

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        time.sleep(self.latency_s)
        data = json.dumps({"rewards": [float(len(query)) for query in queries]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


def _serve(port: Connection, latency_s: float) -> None:
    _Judge.latency_s = latency_s
    server = _Server(("127.0.0.1", 0), _Judge)
    port.send(server.server_port)
    server.serve_forever()


def measure(url: str, samples: int, **params: int) -> float:
    """Seconds to score ``samples`` samples; every value is checked."""
    problems = [Problem(f"p{n}", "", (1,), ("1",)) for n in range(samples // GROUP_SIZE)]
    item = {"name": "remote", "params": {"urls": url, **params}}
    with RewardMix.from_config([item]) as mix:
        collector = Collector(mix, THREADS)
        arriving = (
            Sample(
                problem_id=problem.id,
                index=index,
                token_ids=np.array([1], np.int32),
                log_probs=np.zeros(1, np.float32),
                text="x" * (index + 1),
                finish_reason="stop",
                spans=((0, 0),),
                seed=0,
                engine=0,
            )
            for problem in problems
            for index in range(GROUP_SIZE)
        )
        started_s = time.monotonic()
        groups = collector.collect(problems, arriving, GROUP_SIZE).wait()
        seconds = time.monotonic() - started_s
        collector.close()
    for group in groups:
        assert [s.reward for s in group.samples] == [float(i + 1) for i in range(GROUP_SIZE)]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--latency-s", type=float, default=1.0)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(there, options.latency_s), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}/"
    blocking_s = options.samples * options.latency_s / THREADS
    print(f"{THREADS} threads, one completion each (computed): {blocking_s:.0f} s")
    for params in (
        {"batch_size": 1, "max_concurrent_calls": 256},
        {"batch_size": 16},
        {"batch_size": 64},
    ):
        seconds = measure(url, options.samples, **params)
        print(f"{params}: {seconds:.1f} s, {blocking_s / seconds:.0f} times as fast")
    server.terminate()


if __name__ == "__main__":
    main()
