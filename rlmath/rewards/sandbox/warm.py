"""Sandboxes that are started ahead and run Python in milliseconds; see ``cells.py``."""

from __future__ import annotations

import json
import os
import select
import signal
import site
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox.cell_protocol import END, KEEP, READY, REPLY, REQUEST, RUN, STATUSES
from rlmath.rewards.sandbox.local import LocalProvider, job_folder
from rlmath.rewards.sandbox.provider import Limits, ProviderError
from rlmath.utils.daemon_threads import DaemonThreads

# Packages of programs on mathematics, with parts that they import late.
PRELOAD = ("numpy.random", "scipy.optimize", "scipy.special", "scipy.integrate", "sympy")
_SERVER = str(Path(__file__).with_name("cells.py"))
# Importing the packages takes seconds, minutes on a busy machine with a cold disk.
_SERVER_START_S, _SANDBOX_START_S = 300.0, 60.0
# Seconds after a call's time limit at which a silent sandbox counts as lost.
_GRACE_S = 20.0
_END_S = 10.0


@dataclass(frozen=True)
class CellResult:
    status: str  # ok, error, timeout, memory, or flood: more output than the limit.
    output: bytes
    exit_code: int  # Exit code of its process, a signal as its negated number; 0 while it runs.
    seconds: float


class Sandbox:
    """A sandbox, used by one thread at a time."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        self.has_names = False  # It keeps the names of earlier calls.
        self._link = link
        # It notices after a block that the output is too long.
        self._most_bytes = (limits.output_kib + 128) * 1024
        self._is_clean: bool | None = True  # None: unknown yet

    def run(self, code: str, *, keep: bool = False) -> CellResult:
        """Run code. Raises ProviderError: the sandbox is lost, and nothing is known about the
        code."""
        if not self.is_clean():
            self.has_names = False
            raise ProviderError("the sandbox was used up")
        try:
            self._send(KEEP if keep else RUN, code.encode("utf-8", "replace"))
            head = self._read(REPLY.size)
            status, self.has_names, exit_code, seconds, length = REPLY.unpack(head)
            if status >= len(STATUSES) or length > self._most_bytes:
                raise OSError("its reply cannot be read")
            output = self._read(length)
        except OSError as error:
            self._is_clean = self.has_names = False
            raise ProviderError(f"a sandbox was lost: {error}") from error
        self._is_clean = True if self.has_names else None
        if STATUSES[status] == "infrastructure":
            text = output.decode("utf-8", "replace") or "out of memory"
            raise ProviderError(f"a sandbox could not start or keep a process: {text}")
        return CellResult(STATUSES[status], output, exit_code, seconds)

    def forget(self) -> None:
        """Forget the names of earlier calls."""
        if self.has_names:
            self.has_names, self._is_clean = False, None
            with suppress(OSError):
                self._send(END, b"")

    def is_clean(self) -> bool:
        """Whether it lives, and calls left nothing behind in it; else it cannot be used again."""
        if self._is_clean is None:
            try:
                self._is_clean = self._read(1) == b"\x01"
            except OSError:
                self._is_clean = False
        if not self._is_clean:
            return False
        # It sends nothing unasked, so only its end makes the socket readable.
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        return not poll.poll(0)

    def _send(self, kind: int, code: bytes) -> None:
        self._link.sendall(REQUEST.pack(kind, len(code)) + code)

    def _read(self, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            block = self._link.recv(length - len(found))
            if not block:
                raise OSError("it ended")
            found += block
        return bytes(found)

    def close(self) -> None:
        self._is_clean = self.has_names = False
        # Wakes a thread that waits for its answer, too.
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)


class _Server:
    """The process that forks sandboxes. Thread-safe."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = json.dumps({**job, "control": theirs.fileno()})
        environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        names = ("LANG", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment |= {name: job["env"][name] for name in names}
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", _SERVER, arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self._started = False

    def fork(self, uid: int, theirs: socket.socket) -> tuple[int, int]:
        """Start a sandbox; returns its parent's process id and process descriptor. Raises
        ProviderError: the server is gone."""
        with self._lock:
            if not self._started:
                self._receive(_SERVER_START_S)
                self._started = True
            pid = self._exchange({"uid": uid}, (theirs.fileno(),))
            return pid, os.pidfd_open(pid)

    def end(self, pid: int, descriptor: int) -> None:
        """End a sandbox with all its processes; returns once they have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(_END_S * 1000):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        with self._lock, suppress(ProviderError):
            self._exchange({"reap": pid})
        os.close(descriptor)

    def _exchange(self, message: dict[str, int], links: tuple[int, ...] = ()) -> int:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], links)
        except OSError as error:
            raise ProviderError(f"the server of the sandboxes is gone: {error}") from error
        return self._receive(_SANDBOX_START_S)

    def _receive(self, wait_s: float) -> int:
        self._control.settimeout(wait_s)
        try:
            data = self._control.recv(65536)
        except OSError as error:
            raise ProviderError(f"the server of the sandboxes does not answer: {error}") from error
        message = json.loads(data or '{"error": "it has ended"}')
        if "error" in message:
            raise ProviderError(f"the server of the sandboxes: {message['error']}")
        return int(message["pid"])

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class WarmSandboxes:
    """A pool of sandboxes. Thread-safe.

    A sandbox in which a call left a process or a file, or that was ended at a limit, is replaced.
    Raises RewardSettingError: the provider has another level.

    Args:
        provider: Has level ``namespace``; decides what sandboxes see of this machine.
        limits: Limits of each call; ``output_kib`` ends a call with more output.
        ahead: How many to keep ready.
        most: Most that exist at a time, those that keep names included.
    """

    def __init__(self, provider: LocalProvider, limits: Limits, *, ahead: int, most: int) -> None:
        if provider.level != "namespace":
            raise RewardSettingError(
                f"warm sandboxes need level namespace, and this machine allows {provider.level}"
            )
        packages = [path for path in site.getsitepackages() if os.path.isdir(path)]
        self._provider, self._limits = provider, limits
        self._ahead, self._most = ahead, max(ahead, most)
        self._resources = ExitStack()
        folder = self._resources.enter_context(job_folder({}, ""))
        job = provider.job(limits, folder)
        job["env"]["PYTHONPATH"] = os.pathsep.join(packages)
        self._job = {
            **job,
            "read_only_paths": [*job["read_only_paths"], *packages],
            "process_limit": job["process_limit"] + 2,  # the sandbox's own, under the same user id
            "limit_address_space": True,
            "stack_share": 1 / 16,
            "argv": provider.resolve(("{python}",)),
            "preload": PRELOAD,
        }
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self._idle: deque[Sandbox] = deque()
        self._all: dict[Sandbox, tuple[_Server, tuple[int, int], ExitStack]] = {}
        self._count = 0
        self._closed = False
        self._background = DaemonThreads(1, "sandboxes")
        for _ in range(ahead):
            self._background.submit(self._add)

    @contextmanager
    def one(self) -> Iterator[Sandbox]:
        """A sandbox for one call. Raises ProviderError: none can be started."""
        sandbox = self.take()
        try:
            yield sandbox
        finally:
            self.give_back(sandbox)

    def take(self) -> Sandbox:
        """A sandbox until it is given back; waits while all are in use. Raises ProviderError: none
        can be started, or the pool is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._idle or self._count < self._most
                )
                if self._closed:
                    raise ProviderError("the sandboxes are closed")
                if not self._idle:
                    self._count += 1
                    break
                sandbox = self._idle.popleft()  # the one that has been ready for longest
            if sandbox.is_clean():
                return sandbox
            with suppress(RuntimeError):  # closed meanwhile, which ends it too
                self._background.submit(self._replace, sandbox)
        return self._start()

    def give_back(self, sandbox: Sandbox) -> None:
        sandbox.forget()
        with self._changed:
            self._idle.append(sandbox)
            self._changed.notify()

    def _replace(self, sandbox: Sandbox) -> None:
        self._end(sandbox)
        self._add()

    def _add(self) -> None:
        """Start one more, unless enough are ready."""
        with self._changed:
            if self._closed or len(self._idle) >= self._ahead or self._count >= self._most:
                return
            self._count += 1
        with suppress(ProviderError):  # the next call says why
            sandbox = self._start()
            with self._changed:
                self._idle.append(sandbox)
                self._changed.notify()

    def _start(self) -> Sandbox:
        """A new sandbox, which is already counted. Raises ProviderError: it cannot be started; it
        is not counted then."""
        resources = ExitStack()
        link, theirs = socket.socketpair()
        resources.callback(link.close)
        try:
            with theirs:
                uid = resources.enter_context(self._provider.user_ids.one())
                server = self._running_server()
                process = server.fork(uid, theirs)
            sandbox = Sandbox(link, self._limits)
            with self._changed:
                self._all[sandbox] = server, process, resources
            link.settimeout(_SANDBOX_START_S)
        except BaseException:
            resources.close()
            self._uncount()
            raise
        try:
            said = link.recv(1000)
        except OSError as error:
            said = str(error).encode()
        if said != READY:
            self._end(sandbox)
            text = said.decode("utf-8", "replace") or "it ended"
            raise ProviderError(f"no warm sandbox can be built here: {text}")
        link.settimeout(self._limits.wall_s + _GRACE_S)
        return sandbox

    def _running_server(self) -> _Server:
        with self._changed:
            if self._closed:
                raise ProviderError("the sandboxes are closed")
            if self._server is None or not self._server.is_running():
                if self._server is not None:
                    self._server.close()
                self._server = _Server(self._job)
            return self._server

    def _end(self, sandbox: Sandbox) -> None:
        with self._changed:
            found = self._all.pop(sandbox, None)
        if found is not None:
            server, process, resources = found
            server.end(*process)
            resources.close()
            self._uncount()

    def _uncount(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    def close(self) -> None:
        """End all sandboxes; calls that run end with a ProviderError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._background.close(_END_S)
        with self._changed:
            sandboxes = list(self._all)
        for sandbox in sandboxes:
            sandbox.close()
            self._end(sandbox)
        if self._server is not None:
            self._server.close()
        self._resources.close()
