"""A weight transport: shared memory that logs how long each weight sync takes.

rlmath train experiment=quickstart \\
    weights.transport=examples/plugins/weight_transport.py:TimedSharedMemory
"""

from __future__ import annotations

import time
from typing import Any

from rlmath.engines.transport import TRANSPORTS, SharedMemory


class Timed:
    """One trainer rank's end: passes on what it is asked for."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send_weights(self, version: int) -> None:
        start_s = time.perf_counter()
        self._connection.send_weights(version)
        print(f"version {version} sent in {time.perf_counter() - start_s:.3f} s", flush=True)

    def shutdown(self) -> None:
        self._connection.shutdown()


@TRANSPORTS.register("timed_shared_memory")
class TimedSharedMemory(SharedMemory):
    """Its vLLM workers are those of ``shared_memory``, by the inherited ``backend``."""

    def connect(self, plan: Any, gatherer: Any, platform: Any) -> Any:
        return Timed(super().connect(plan, gatherer, platform))
