"""The worker process: one symbolic comparison at a time, asked and answered over pipes.

The parent owns the deadline and kills the process group. When the parent is gone, the fork server
ends and the kernel ends the worker with it; an alarm with its default action (death) does so
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from rlmath.grading import verifiers
from rlmath.grading.answer import read
from rlmath.grading.compare import Comparer
from rlmath.grading.settings import GradingSettings

_GRACE_S = 10


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Write one message, as JSON: plain data, never code."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Read one message; EOFError when the other end is gone."""
    return json.loads(connection.recv_bytes())


def limit_resources(memory_limit_mib: int, beside: int = 0) -> None:
    """Bound the address space; allow no files, core dumps or further processes. ``beside``: bytes
    that are no part of the limit."""
    size = memory_limit_mib * 1024 * 1024 + beside
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _mapped_bytes() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def serve(requests: int, replies: int, settings: GradingSettings) -> None:
    """Answer comparisons from one pipe on the other until the first one closes."""
    from rlmath.grading import symbolic

    jobs, answers = Connection(requests, writable=False), Connection(replies, readable=False)
    # A verifier's packages may map more than the limit before its first job.
    limit_resources(settings.memory_limit_mib, _mapped_bytes() if settings.verifier else 0)
    sys.setrecursionlimit(5_000)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    alarm_s = int(settings.timeout_s) + _GRACE_S
    comparer = Comparer(settings, symbolic.equal)
    auditor = Comparer(settings, symbolic.equal, only_oracle=True)
    while True:
        try:
            job = receive(jobs)
        except EOFError:
            return
        signal.alarm(alarm_s)
        reply: dict[str, Any]
        try:
            if "has_verifier" in job:
                verifiers.VERIFIERS.get(str(settings.verifier))
                reply = {}
            elif settings.verifier is not None:
                reply = verifiers.verify(settings, job["answer"], job["gold"])
            else:
                answer, gold = read(job["answer"]), read(job["gold"])
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
        send(answers, reply)
        if reply.get("error") == "out of memory":
            return
