"""Run programs on this machine, each in its own sandbox.

Isolation by level (``LocalProvider.level`` is the one in use):

    namespace  its own user, processes, network (none) and files: the system's programs, read-only,
               and a clean folder in memory. No other files of the machine are visible.
    user       its own user id in a clean temporary folder; a system call filter denies the network
               and signals to others. With Landlock the machine's files are inaccessible; without
               it, world-readable files can be read.
    process    as ``user``, but under the trainer's user id: for machines that allow nothing else.

All levels limit CPU time, wall time, memory, disk, output and the number of processes, start with
an empty environment, and end all processes that a program left behind.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from secrets import randbelow
from typing import Any, Literal
from uuid import uuid4

from rlmath.rewards.base import RewardSettingError
from rlmath.rewards.sandbox import landlock
from rlmath.rewards.sandbox.disk import disk_use_mib
from rlmath.rewards.sandbox.memory import process_tree, tree_memory_mib
from rlmath.rewards.sandbox.provider import (
    CodeProvider,
    Execution,
    Language,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
    Status,
    language_of,
)

log = logging.getLogger(__name__)

Level = Literal["namespace", "user", "process"]
LEVELS: tuple[Level, ...] = ("namespace", "user", "process")

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_SYSTEM_PATHS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
_SETUP_LIMIT_S = 30.0
_COMPILE_LIMITS = Limits(
    cpu_s=30, wall_s=60.0, memory_mib=2048, file_size_mib=128, output_kib=256, processes=32
)
# Added to a program's limit: the launcher's two Pythons, and pages counted twice after a fork.
_MEMORY_SLACK_MIB = 64
# Folders and the program itself, in addition to a file of the maximum size.
_DISK_SLACK_MIB = 1


class LocalProvider(CodeProvider):
    """Runs programs in sandboxes on this machine. Raises RewardSettingError: the level does not
    work on this machine; the message says why.

    Args:
        max_parallel: Maximum number of concurrent runs; ``None``: the number of CPUs.
        level: Isolation level; ``auto``: the strongest that works here.
        python: Interpreter for Python programs; ``None``: rlmath's base interpreter, without the
            environment's packages.
        read_only_paths: Additional paths that programs may read, for example a folder with
            packages.
    """

    def __init__(
        self,
        max_parallel: int | None = None,
        level: Level | Literal["auto"] = "auto",
        python: str | None = None,
        read_only_paths: tuple[str, ...] = (),
    ) -> None:
        self.max_parallel = max_parallel or os.cpu_count() or 1
        self._slots = threading.BoundedSemaphore(self.max_parallel)
        base = python or getattr(sys, "_base_executable", None) or sys.executable
        self.python = self._wanted_python = os.path.realpath(base)
        self._extra_paths = read_only_paths
        self.user_ids = UserIds()
        self.level = self._choose(level)

    def _choose(self, wanted: Level | Literal["auto"]) -> Level:
        if wanted != "auto" and wanted not in LEVELS:
            raise RewardSettingError(f"sandbox level {wanted!r}; use auto, {', '.join(LEVELS)}")
        reasons: list[str] = []
        for level in LEVELS if wanted == "auto" else (wanted,):
            reason = self._why_not(level)
            if reason is None:
                if wanted == "auto" and not self.hides_files:
                    log.warning(
                        "the code sandbox runs at level %r without Landlock (%s); programs can "
                        "read what %s can read",
                        level,
                        "; ".join(reasons),
                        "everyone on this machine" if level == "user" else "the trainer",
                    )
                return level
            reasons.append(f"{level}: {reason}")
        raise RewardSettingError(
            f"no sandbox level works on this machine ({'; '.join(reasons)}); use a remote provider "
            f"(piston, e2b, morph)"
        )

    def _why_not(self, level: Level) -> str | None:
        """Run a trivial program at this level; ``None`` if it works, else the reason."""
        if level == "user" and os.geteuid() != 0:
            return "only root can change to another user id"
        if level == "process" and os.geteuid() == 0:
            return "root's own processes have no limit on their number"
        self.level = level
        self.python = self._wanted_python
        if level == "user" and not _open_to_all(self.python):
            system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
            if system is None or not _open_to_all(os.path.realpath(system)):
                return (
                    f"{self.python} is in a folder that other users cannot enter; give "
                    f"provider_settings.python, an interpreter that they can run"
                )
            self.python = os.path.realpath(system)
        probe = Program("python", "print(input()[::-1])")
        try:
            with self.prepare(probe, Limits(wall_s=20.0)) as prepared:
                result = prepared.run("olleh\n")
        except ProviderError as error:
            return str(error)
        if result.stdout != "hello\n":
            return f"the trial program ended with {result.status}: {result.stderr[:200]}"
        return None

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        language = language_of(program)
        if not (language.tool.startswith("{") or shutil.which(language.tool)):
            raise ProviderError(f"language {program.language!r}: {language.tool} is not installed")
        for path in (*program.files, *program.collect):
            _check_relative(path)
        return _Prepared(self, language, program, limits)

    def execute(
        self,
        command: tuple[str, ...],
        files: Mapping[str, str | bytes],
        stdin: str,
        limits: Limits,
        collect: tuple[str, ...],
        language: Language,
    ) -> tuple[Execution, dict[str, bytes]]:
        """Run a command in a new sandbox; returns the result and the collected files."""
        with self._slots, job_folder(files, stdin) as folder, self.user_ids.one() as uid:
            return _Run(self, command, folder, uid, limits, collect, language).finish()

    def job(self, limits: Limits, folder: Path) -> dict[str, Any]:
        """The launcher's settings that do not depend on the program."""
        own_disk = self.level == "namespace"
        home = "/work" if own_disk else str(folder / "work")
        return {
            "level": self.level,
            "env": {
                "PATH": f"{Path(self.python).parent}:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "TMPDIR": "/tmp" if own_disk else home,
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "OPENSSL_CONF": "/dev/null",  # OpenSSL fails on a file that it may not read
            },
            "work_dir": str(folder / "work"),
            "out_dir": str(folder / "out"),
            "root_dir": str(folder / "root"),
            "read_only_paths": self.read_only_paths,
            "limits": dict(vars(limits)),
            "process_limit": limits.processes + _processes_counted_against(self.level),
            "landlock": self.hides_files,
        }

    def resolve(self, command: tuple[str, ...]) -> list[str]:
        """The command with full paths, because programs do not inherit ``PATH``."""
        first = self.python if command[0] == "{python}" else command[0]
        if "/" not in first:
            first = shutil.which(first) or f"/usr/bin/{first}"
        return [first, *command[1:]]

    @property
    def hides_files(self) -> bool:
        """Whether programs cannot read the machine's other files."""
        return self.level == "namespace" or landlock.version() > 0

    @property
    def read_only_paths(self) -> list[str]:
        """Paths of this machine that programs may read; the interpreter's library is two levels
        above ``bin/python``."""
        wanted = (*_SYSTEM_PATHS, str(Path(self.python).parent.parent), *self._extra_paths)
        return [p for p in dict.fromkeys(wanted) if p != "/" and os.path.lexists(p)]


def _open_to_all(path: str) -> bool:
    """Whether every user may traverse the folders above ``path``."""
    return all(parent.stat().st_mode & 0o001 for parent in Path(path).parents)


class UserIds:
    """Allocate user ids, unique among the sandboxes of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: set[int] = set()

    @contextmanager
    def one(self) -> Iterator[int]:
        with self._lock:
            uid = next(u for u in iter(lambda: 20000 + randbelow(40000), 0) if u not in self._used)
            self._used.add(uid)
        try:
            yield uid
        finally:
            with self._lock:
                self._used.discard(uid)


def _check_relative(path: str) -> None:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ProviderError(f"file {path!r}: only paths inside the program's folder are taken")


@contextmanager
def job_folder(files: Mapping[str, str | bytes], stdin: str) -> Iterator[Path]:
    """A temporary folder with ``work`` (the program's), ``out``, ``root`` and ``stdin``."""
    folder = Path(tempfile.mkdtemp(prefix="rlmath-sandbox-"))
    try:
        folder.chmod(0o711)  # a program under another user id must reach its own folder
        for name in ("work", "out", "root"):
            (folder / name).mkdir()
        (folder / "work").chmod(0o700)
        for name, content in files.items():
            path = folder / "work" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode("utf-8", "replace") if isinstance(content, str) else content
            path.write_bytes(data)
            if isinstance(content, bytes):
                path.chmod(0o755)
        (folder / "stdin").write_bytes(stdin.encode("utf-8", "replace"))
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder that the program may have locked or nested very deeply.

    Each inner folder is moved to the top before it is emptied, so no path exceeds the maximum
    length and nothing recurses.
    """
    with suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            pending = [""]
            while pending:
                _unnest(top, pending.pop(), pending)
        finally:
            os.close(top)
    shutil.rmtree(folder, ignore_errors=True)


def _unnest(top: int, name: str, pending: list[str]) -> None:
    """Delete the files of one folder in `top` ("" is `top` itself), and move its folders up."""
    at = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        with os.scandir(at) as entries:
            inner = list(entries)
        for entry in inner:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=at)
                    continue
                os.chmod(entry.name, 0o700, dir_fd=at)
                moved = f"{uuid4()}"
                os.rename(entry.name, moved, src_dir_fd=at, dst_dir_fd=top)
                pending.append(moved)
    finally:
        os.close(at)
    if name:
        os.rmdir(name, dir_fd=top)


class _Prepared(PreparedProgram):
    def __init__(
        self, provider: LocalProvider, language: Language, program: Program, limits: Limits
    ) -> None:
        self._provider = provider
        self._language = language
        self._program = program
        self._limits = limits
        self._binary: bytes | None = None
        if language.compile:
            sources = {**program.files, language.file: program.source}
            result, built = provider.execute(
                language.compile, sources, "", _COMPILE_LIMITS, ("main",), language
            )
            self._binary = built.get("main")
            if result.status != "ok" or self._binary is None:
                self.compile_error = result.stderr or result.status

    def run(self, stdin: str = "", files: Mapping[str, str] | None = None) -> Execution:
        if self.compile_error is not None:
            raise ProviderError("this program did not compile")
        for path in files or {}:
            _check_relative(path)
        content: dict[str, str | bytes] = {**self._program.files, **(files or {})}
        if self._binary is None:
            content[self._language.file] = self._program.source
        else:
            content["main"] = self._binary
        result, collected = self._provider.execute(
            (*self._language.run, *self._program.args),
            content,
            stdin,
            self._limits,
            self._program.collect,
            self._language,
        )
        texts = {name: data.decode("utf-8", "replace") for name, data in collected.items()}
        return replace(result, files=texts)


class _Run:
    """One sandboxed process tree, from start to cleanup."""

    def __init__(
        self,
        provider: LocalProvider,
        command: tuple[str, ...],
        folder: Path,
        uid: int,
        limits: Limits,
        collect: tuple[str, ...],
        language: Language,
    ) -> None:
        self.limits = limits
        self.folder = folder
        self.collect = collect
        self.limit_bytes = limits.output_kib * 1024
        self.output: dict[str, bytearray] = {
            "stdout": bytearray(),
            "stderr": bytearray(),
            "status": bytearray(),
        }
        status_read, status_write = os.pipe()
        self.level = provider.level
        job: dict[str, Any] = {
            **provider.job(limits, folder),
            "uid": uid,
            "argv": provider.resolve(command),
            "collect": list(collect),
            "limit_address_space": language.limit_address_space,
            "stack_share": language.stack_share,
            "status_fd": status_write,
        }
        try:
            with open(folder / "stdin", "rb") as stdin:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _LAUNCHER, json.dumps(job)],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(status_write,),
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            os.close(status_read)
            raise ProviderError(f"the sandbox's launcher did not start: {error}") from error
        finally:
            os.close(status_write)
        self.status_read = status_read

    def finish(self) -> tuple[Execution, dict[str, bytes]]:
        """Wait for the end, or force it at a limit. Raises ProviderError: the sandbox could not be
        built."""
        try:
            ended, seconds = self._watch()
        finally:
            self._kill()
            os.close(self.status_read)
        report = self._report()
        if "error" in report:
            raise ProviderError(f"the sandbox could not be built: {report['error']}")
        if ended is None and "exit" not in report:
            raise ProviderError("the sandbox ended without a report")
        exit_code = report.get("exit")
        status: Status = ended or "ok"
        if ended is None and exit_code != 0:
            # The kernel counts in ticks, so the reported time may be slightly short.
            used_up = float(report.get("cpu_s", 0.0)) >= self.limits.cpu_s * 0.8
            cut = exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and used_up)
            status = "timeout" if cut else "runtime_error"
        result = Execution(
            status=status,
            stdout=self.output["stdout"][: self.limit_bytes].decode("utf-8", "replace"),
            stderr=self.output["stderr"][: self.limit_bytes].decode("utf-8", "replace"),
            exit_code=exit_code,
            seconds=seconds,
        )
        files = {}
        for name in self.collect:
            path = self.folder / "out" / name.replace("/", "_")
            if path.is_file():
                files[name] = path.read_bytes()
        return result, files

    def _watch(self) -> tuple[Status | None, float]:
        """Read the pipes until the report arrives or a limit is exceeded. Returns the exceeded
        limit, if any, and the program's wall time."""
        assert self.process.stdout is not None and self.process.stderr is not None
        begun = time.monotonic()
        started: float | None = None
        next_look = begun + 0.2
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ, "stdout")
            selector.register(self.process.stderr, selectors.EVENT_READ, "stderr")
            selector.register(self.status_read, selectors.EVENT_READ, "status")
            while True:
                now = time.monotonic()
                if started is None and b"\n" in self.output["status"]:
                    started = now
                limit = begun + _SETUP_LIMIT_S if started is None else started + self.limits.wall_s
                if now >= limit:
                    if started is None:
                        raise ProviderError(f"no sandbox within {_SETUP_LIMIT_S:g} s")
                    return "timeout", now - started
                if now >= next_look:
                    next_look = now + 0.1
                    passed = self._passed_limit()
                    if passed is not None:
                        return passed, now - (started or begun)
                for key, _ in selector.select(min(limit, next_look) - now):
                    block = os.read(key.fd, 65536)
                    self.output[key.data] += block
                    if self._over_output():
                        return "output_limit", now - (started or begun)
                    # Do not wait for the namespaces to be torn down, which can take seconds.
                    if key.data == "status" and (
                        not block or self.output["status"].count(b"\n") > 1
                    ):
                        selector.unregister(key.fileobj)
                        self._drain(selector)
                        over = self._over_output()
                        return ("output_limit" if over else None), now - (started or begun)
                    if not block:
                        selector.unregister(key.fileobj)

    def _passed_limit(self) -> Status | None:
        """The limit that memory or disk exceeded, if any."""
        processes = process_tree(self.process.pid)
        if tree_memory_mib(processes) > self.limits.memory_mib + _MEMORY_SLACK_MIB:
            return "memory"
        if self.level != "namespace":
            most = self.limits.file_size_mib
            used = disk_use_mib(
                self.folder / "work", processes, most, same_user=self.level == "process"
            )
            if used > most + _DISK_SLACK_MIB:
                return "disk_limit"
        return None

    def _over_output(self) -> bool:
        return any(len(self.output[n]) > self.limit_bytes for n in ("stdout", "stderr"))

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Read output that is still in the pipes."""
        self._kill_group()
        deadline = time.monotonic() + 2.0
        while selector.get_map() and time.monotonic() < deadline and not self._over_output():
            for key, _ in selector.select(0.1):
                block = os.read(key.fd, 65536)
                if block:
                    self.output[key.data] += block
                else:
                    selector.unregister(key.fileobj)

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {}
        for line in bytes(self.output["status"]).splitlines():
            with suppress(ValueError):
                report.update(json.loads(line))
        return report

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _kill(self) -> None:
        self._kill_group()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _processes_counted_against(level: Level) -> int:
    """Number of processes that the kernel already counts against the sandbox's user id."""
    if os.geteuid() == 0 and level != "process":
        return 0  # its own id
    release = os.uname().release.split("-")[0].split(".")
    if level == "namespace" and (int(release[0]), int(release[1])) >= (5, 14):
        return 0  # counted for each user namespace since Linux 5.14
    uid = os.geteuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count
