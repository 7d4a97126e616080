"""The fork server: a clean process that imports SymPy once and forks workers from itself.

It is started as a new program with a scrubbed environment, so a worker inherits nothing from the
training process but two pipes. A fork costs milliseconds where a new import of SymPy costs a
second: a killed worker is back at once. The server reaps a worker only when it is told to, so the
process id that the parent kills cannot have been given to another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from rlmath.grading.settings import GradingSettings
from rlmath.grading.worker import serve
from rlmath.plugins import loading
from rlmath.utils.child_processes import end_with_parent

_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rlmath.grading.forkserver import main; main(int(sys.argv[1]), int(sys.argv[3]))"
)
_MESSAGE_BYTES = 65_536


class ForkServerDied(Exception):
    """The fork server did not start, or is gone."""


class ForkServer:
    """The parent's handle on one fork server. ``settings``: sent to the workers;
    `startup_timeout_s` limits the start and every fork. Raises ForkServerDied: it did not start in
    time."""

    def __init__(self, settings: GradingSettings) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *[p for p in sys.path if p and p != root]]
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment.update(
            PYTHONHASHSEED="0", LC_ALL="C.UTF-8", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"
        )
        if settings.verifier is not None:
            environment.update(loading.environment())
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(settings.startup_timeout_s)
        arguments = (str(theirs.fileno()), json.dumps(paths), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        try:
            self._exchange({"settings": dataclasses.asdict(settings)})
        except ForkServerDied:
            self.close()
            raise

    def _exchange(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
                reply = self._socket.recv(_MESSAGE_BYTES)
            except OSError as error:
                raise ForkServerDied from error
        if not reply:
            raise ForkServerDied
        return int(json.loads(reply)["pid"])

    def fork(self, requests: int, replies: int) -> int:
        """Start a worker that reads `requests` and writes `replies`; its process id. Raises
        ForkServerDied: the server is gone."""
        return self._exchange({"do": "fork"}, (requests, replies))

    def reap(self, pid: int) -> None:
        """Forget a worker that has been killed."""
        self._exchange({"do": "reap", "pid": pid})

    def close(self) -> None:
        """Kill the server. Its workers see their pipes close."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(descriptor: int, parent_pid: int) -> None:
    """Run the server on an inherited socket until the other end closes."""
    # Also while it imports SymPy, which takes its time on a busy machine.
    end_with_parent(parent_pid)
    loading.import_from_environment()
    parent = socket.socket(fileno=descriptor)
    start = json.loads(parent.recv(_MESSAGE_BYTES))
    settings = GradingSettings(**start["settings"])

    from rlmath.grading import symbolic

    symbolic.warm_up()
    parent.send(json.dumps({"pid": os.getpid()}).encode())
    own_pid = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(parent, _MESSAGE_BYTES, 2)
        if not data:
            return
        message = json.loads(data)
        if message["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                _become_worker(parent, descriptors, settings, own_pid)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too: the group exists before the parent hears of it
            for inherited in descriptors:
                os.close(inherited)
        else:
            pid = int(message["pid"])
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        parent.send(json.dumps({"pid": pid}).encode())


def _become_worker(
    parent: socket.socket, descriptors: list[int], settings: GradingSettings, server_pid: int
) -> None:
    status = 1
    try:
        end_with_parent(server_pid)
        os.setpgid(0, 0)
        parent.close()
        serve(descriptors[0], descriptors[1], settings)
        status = 0
    finally:
        os._exit(status)
