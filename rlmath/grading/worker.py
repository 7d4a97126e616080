"""The worker process: one symbolic comparison at a time, asked and answered over pipes.

A message is a 4-byte big-endian length and that many bytes of JSON: plain data, never code. The
parent owns the deadline and kills the process group. When the parent is gone, the fork server ends
and the kernel ends the worker with it; an alarm with its default action (death) does so elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

from rlmath.grading.answer import read
from rlmath.grading.compare import Comparer
from rlmath.grading.settings import GradingSettings

_HEADER = struct.Struct(">I")
_GRACE_S = 10


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message to a file descriptor."""
    data = json.dumps(message).encode()
    data = _HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(descriptor, count - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def receive(descriptor: int) -> dict[str, Any]:
    """Read one message from a file descriptor; EOFError when the other end is gone."""
    (length,) = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size))
    message: dict[str, Any] = json.loads(_read_exactly(descriptor, length))
    return message


def limit_resources(memory_limit_mib: int) -> None:
    """Bound the address space; allow no files, core dumps or further processes."""
    size = memory_limit_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def serve(requests: int, replies: int, settings: GradingSettings) -> None:
    """Answer comparisons from one pipe on the other until the first one closes."""
    from rlmath.grading import symbolic

    limit_resources(settings.memory_limit_mib)
    sys.setrecursionlimit(5_000)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    alarm_s = int(settings.timeout_s) + _GRACE_S
    comparer = Comparer(settings, symbolic.equal)
    auditor = Comparer(settings, symbolic.equal, only_oracle=True)
    while True:
        try:
            job = receive(requests)
        except EOFError:
            return
        signal.alarm(alarm_s)
        reply: dict[str, Any]
        try:
            answer, gold = read(job["answer"], settings), read(job["gold"], settings)
            chosen = auditor if job.get("audit") else comparer
            verdict = chosen.same(answer, gold, job["task"])
            reply = {"verdict": verdict, "method": chosen.last_layer}
        except MemoryError:
            reply = {"error": "out of memory"}
        except RecursionError:
            reply = {"error": "nested too deeply"}
        except Exception as error:  # whatever SymPy raises is this job's result, not our end
            reply = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.alarm(0)
        send(replies, reply)
        if reply.get("error") == "out of memory":
            return
