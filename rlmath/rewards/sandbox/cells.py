"""Warm sandboxes for Python that the model wrote. A script, not a module; ``warm.py`` starts it.

Three kinds of processes:

    server    Imports NumPy and the like once, and forks a sandbox on request. Not sandboxed.
    sandbox   Process 1 in own namespaces, with the root folder of ``launcher.py``. Runs none of
              the model's code: it forks cells, reads their output, and ends what they leave behind.
    cell      Runs the code: another user id, limits, no capability, a system call filter. It is
              forked ahead and waits for the code, so a call costs what the code costs.

A cell reports only about itself, by its exit code or one byte, so nothing that the code writes
anywhere can forge the result of another call. Messages: see ``cell_protocol.py``.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cell
import launcher
import syscalls as sc
from cell_protocol import END, KEEP, READY, REPLY, REQUEST, RUN, STATUSES

del sys.path[0]

_WRITABLE = ("/work", "/tmp", "/dev/shm")
_MIB = 2**20
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / _MIB
# The first check of the memory of all processes together, and the time between two, in seconds.
_FIRST_CHECK_S, _CHECK_S = 0.1, 0.05
_MEMORY_SLACK_MIB = 64  # the packages
# Descriptors of a cell, beside its input and its two outputs.
_CODE, _DONE = 3, 4
_START_LIMIT_S = 30.0


class Cell:
    """A process that runs code, one request after the other; see the module's docstring."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._limits, self._most_bytes = job["limits"], job["limits"]["output_kib"] * 1024
        self.calls = 0
        self.exit_code = 0
        self.ended_normally = True
        self._others, self._cpu_s = 0, 0.0
        code, self._code = os.pipe()
        self._output, output = os.pipe()
        self._done, done = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        self.pid = os.fork()
        if self.pid == 0:
            _become_cell(job, (null, output, output, code, done))
        for descriptor in (null, output, code, done):
            os.close(descriptor)
        self._pidfd = os.pidfd_open(self.pid)
        for descriptor in (self._output, self._code):
            os.set_blocking(descriptor, False)

    def run(self, kind: int, code: bytes) -> tuple[str, float, bytearray]:
        """Run code until it is done or passes a limit. Returns ``done``, ``exited`` (without saying
        so), or the limit that was passed; seconds; output."""
        output = bytearray()
        if self.calls > 0:
            self._resume()
        begun = time.monotonic()
        if self.calls > 0 or self._starts():
            status = self._watch(REQUEST.pack(kind, len(code)) + code, output)
        else:
            status = "infrastructure"
        seconds = time.monotonic() - begun
        self.calls += 1
        # Nothing runs between two calls.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP if kind == KEEP and status == "done" else signal.SIGKILL)
        if status == "exited":
            self.reap()
        self.ended_normally = status == "done" or (status == "exited" and self.exit_code >= 0)
        with suppress(BlockingIOError):
            while len(output) <= self._most_bytes and (block := os.read(self._output, 65536)):
                output += block
        return status, seconds, output

    def _starts(self) -> bool:
        """Whether it waits for code; its messages before it runs any cannot be forged."""
        readable, _, _ = select.select([self._done], [], [], _START_LIMIT_S)
        return bool(readable) and os.read(self._done, 1) == READY

    def _resume(self) -> None:
        with suppress(OSError, ValueError):
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            most = int(used) + 1 + self._limits["cpu_s"]
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        os.kill(-1, signal.SIGCONT)

    def _watch(self, request: bytes, output: bytearray) -> str:
        """Send the request and read until the end; returns as :meth:`run`."""
        poll = select.poll()
        for descriptor in (self._output, self._done, self._pidfd):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._code, select.POLLOUT)
        now = time.monotonic()
        deadline, next_check = now + self._limits["wall_s"], now + _FIRST_CHECK_S
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_check:
                if _memory_mib() > self._limits["memory_mib"] + _MEMORY_SLACK_MIB:
                    return "memory"
                next_check = time.monotonic() + _CHECK_S
            for descriptor, _ in poll.poll((min(deadline, next_check) - now) * 1000 + 1):
                if descriptor == self._pidfd:
                    return "exited"
                if descriptor == self._code:
                    try:
                        request = request[os.write(self._code, request) :]
                    except BrokenPipeError:
                        request = b""
                    if not request:
                        poll.unregister(self._code)
                    continue
                block = os.read(descriptor, 65536)
                if not block:
                    poll.unregister(descriptor)
                elif descriptor == self._done:
                    self.exit_code = block[0]
                    return "done"
                else:
                    output += block
                    if len(output) > self._most_bytes:
                        return "flood"

    def reap(self) -> bool:
        """End remaining processes; whether the sandbox is clean, without processes or new files."""
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                pid, how, usage = os.wait4(-1, 0)
                if pid == self.pid:
                    self.exit_code = os.waitstatus_to_exitcode(how)
                    self._cpu_s = usage.ru_utime + usage.ru_stime
                else:
                    self._others += 1
        return self._others == 0 and _folders() == self._job["folders"]

    def close(self) -> None:
        for descriptor in (self._code, self._output, self._done, self._pidfd):
            os.close(descriptor)

    def status_of_exit(self) -> str:
        """The status of a cell that is done or exited."""
        # The kernel counts in ticks, so the reported time may be slightly short.
        used_up = self._cpu_s >= self._limits["cpu_s"] * 0.8
        if self.exit_code == -signal.SIGXCPU or (self.exit_code == -signal.SIGKILL and used_up):
            return "timeout"
        if self.exit_code == -signal.SIGKILL and _oom_kills() != self._job["oom_kills"]:
            return "infrastructure"  # The machine is out of memory, for whatever reason.
        return {cell.OK: "ok", cell.MEMORY: "memory"}.get(self.exit_code, "error")


def _oom_kills() -> str:
    with open("/proc/vmstat") as file:
        return next((line for line in file if line.startswith("oom_kill ")), "")


def _memory_mib() -> float:
    """Resident memory of all cells' processes; above 64 MiB shared pages are divided."""
    resident = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with suppress(OSError, ValueError), open(f"/proc/{name}/statm") as file:
                resident[name] = int(file.read().split()[1]) * _PAGE_MIB
    if sum(resident.values()) > 64:
        for name in resident:
            with suppress(OSError), open(f"/proc/{name}/smaps_rollup") as file:
                sizes = [int(line.split()[1]) for line in file if line.startswith("Pss:")]
                resident[name] = sum(sizes) / 1024
    return sum(resident.values())


def _folders() -> list[tuple[int, int, int]]:
    """Modes and times of the writable folders, one of which any change in them changes."""
    found = map(os.stat, _WRITABLE)
    return [(one.st_mode, one.st_mtime_ns, one.st_ctime_ns) for one in found]


def _become_cell(job: dict[str, Any], descriptors: tuple[int, ...]) -> NoReturn:
    try:
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
        for target, descriptor in enumerate(high):
            os.dup2(descriptor, target, inheritable=target < _CODE)
        os.closerange(len(high), 65536)
        os.chdir("/work")
        launcher.drop_rights(job["cell"])
        sc.drop_capabilities()
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        sc.install_seccomp(job["filter"])
        gc.enable()
        cell.be_deterministic()
        names, own, number = cell.new_main(), os.getpid(), 0
        cell.run("None", {}, "<cell 0>")  # loads the modules that every call needs
        os.write(_DONE, READY)
        while (request := _read(_CODE, REQUEST.size)) is not None:
            kind, length = REQUEST.unpack(request)
            code = _read(_CODE, length)
            if code is None:
                break
            number += 1
            status = cell.run(code.decode("utf-8", "replace"), names, f"<cell {number}>")
            if os.getpid() != own:  # The code forked, and this is the child.
                os._exit(status)
            if kind == RUN:
                cell.finish()
            os.write(_DONE, bytes([status]))
            if kind == RUN:
                os._exit(status)
    except BaseException as error:  # Before it was ready: the sandbox reports it.
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(cell.ERROR)


def _read(descriptor: int, length: int) -> bytes | None:
    """Read ``length`` bytes; ``None``: the other end closed before."""
    found = b""
    while len(found) < length:
        block = os.read(descriptor, length - len(found))
        if not block:
            return None
        found += block
    return found


def _serve(job: dict[str, Any], link: int) -> None:
    """Be a sandbox: answer requests until the link closes or something was left behind."""
    # SIGKILL to all processes is sent below, which would end the machine outside of a namespace.
    if os.getpid() != 1:
        raise RuntimeError("not in a process namespace")
    launcher.build_root(job)
    for folder in _WRITABLE:
        sc.mount(folder, folder, None, sc.MS_BIND | sc.MS_REC)
    flags = sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV
    sc.mount("none", "/", None, flags)
    if not os.path.isdir("/proc/1"):
        raise OSError("/proc cannot be mounted here")
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # a cell under the same user id cannot look into it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 ignores
    with open("/proc/self/statm") as file:
        own_mib = int(file.read().split()[0]) * _PAGE_MIB
    limits = {**job["limits"], "memory_mib": int(job["limits"]["memory_mib"] + own_mib)}
    job["cell"] = {**job, "limits": limits}
    job["filter"] = "namespace" if os.geteuid() == 0 else "user"
    job["oom_kills"] = _oom_kills()
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path.insert(0, "")
    sys.executable = job["argv"][0]
    for folder in _WRITABLE:
        os.utime(folder, (0, 0))
    job["folders"] = _folders()
    here = Cell(job)
    os.write(link, READY)
    while _answer(here, link):
        if here.calls == -1:
            here = Cell(job)


def _answer(here: Cell, link: int) -> bool:
    """Answer one request; whether the sandbox is fit for more. Its data ends with this function."""
    head = _read(link, REQUEST.size)
    if head is None:
        return False
    kind, length = REQUEST.unpack(head)
    code = _read(link, length)
    if code is None:
        return False
    if kind == END:
        return _end(here, link)
    status, seconds, output = here.run(kind, code)
    keeps = kind == KEEP and status == "done"
    if status in ("done", "exited"):
        status = here.status_of_exit()
    numbers = (STATUSES.index(status), keeps, here.exit_code, seconds, len(output))
    reply = memoryview(REPLY.pack(*numbers) + output)
    while reply:
        reply = reply[os.write(link, reply) :]
    return keeps or _end(here, link)


def _end(here: Cell, link: int) -> bool:
    """End the cell, and say whether the sandbox is clean. Its result is already on its way."""
    clean = here.reap() and here.ended_normally
    here.close()
    here.calls = -1
    os.write(link, bytes([clean]))
    return clean


def _sandbox(job: dict[str, Any], link: int, server: int) -> NoReturn:
    """Make the namespaces, and wait for the sandbox's end; SIGTERM ends it."""
    os.dup2(link, 3)
    os.closerange(4, 65536)
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            launcher.unshare(job)
            first = os.fork()
            if first == 0:
                sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
                _serve(job, 3)
                os._exit(0)
            # The kernel reports its end once all processes of its namespace have ended.
            signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
            os.close(3)
            os.waitpid(first, 0)
    except BaseException as error:
        with suppress(OSError):
            os.write(3, f"{type(error).__name__}: {error}"[:1000].encode())
    finally:
        os._exit(0)


def main() -> None:
    """Be the server, or say why not."""
    job = json.loads(sys.argv[1])
    control = socket.socket(fileno=job["control"])
    try:
        _fork_sandboxes(job, control)
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())


def _fork_sandboxes(job: dict[str, Any], control: socket.socket) -> None:
    """Fork sandboxes until the other end of the control socket closes."""
    for name in job["preload"]:
        with suppress(Exception):  # It is not installed, or does not work here.
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"importing {', '.join(job['preload'])} starts threads")
    gc.collect()
    gc.disable()
    gc.freeze()
    control.send(json.dumps({"pid": os.getpid()}).encode())
    while True:
        data, links, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            return
        message = json.loads(data)
        if "reap" in message:
            pid = message["reap"]
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        else:
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                _sandbox({**job, **message}, links[0], server)
            os.close(links[0])
        control.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    main()
