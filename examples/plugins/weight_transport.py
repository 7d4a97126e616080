"""A weight transport: shared memory that logs how long each weight sync takes.

rlmath train experiment=quickstart weights.transport_options.longer_than_s=0.1 \\
    weights.transport=examples/plugins/weight_transport.py:TimedSharedMemory
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rlmath.engines.transport import TRANSPORTS, SharedMemory
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class TimedOptions(Options):
    longer_than_s: float = setting(0.0, "Log weight syncs that take longer.", least=0)


class Timed:  # One trainer rank's end: passes on what it is asked for.
    def __init__(self, connection: Any, longer_than_s: float) -> None:
        self._connection, self._longer_than_s = connection, longer_than_s
        self.shutdown = connection.shutdown

    def send_weights(self, version: int) -> None:
        start_s = time.perf_counter()
        self._connection.send_weights(version)
        if (took_s := time.perf_counter() - start_s) > self._longer_than_s:
            print(f"version {version} sent in {took_s:.3f} s", flush=True)


@TRANSPORTS.register("timed_shared_memory", TimedOptions)
class TimedSharedMemory(SharedMemory):  # Its vLLM workers are those of ``shared_memory``.
    def connect(self, plan: Any, gatherer: Any, platform: Any) -> Any:
        return Timed(super().connect(plan, gatherer, platform), self.options.longer_than_s)
