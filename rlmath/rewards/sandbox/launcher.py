"""Build the sandbox around one program, run it, and report how it ended. A script, not a module.

Started by ``local.py`` as ``python -I -S launcher.py <settings as JSON>``. Standard input, output
and error belong to the program. The launcher writes one JSON object per line to the descriptor
``status_fd``: ``{"started": true}`` just before the program starts, then ``{"exit": ..., ...}`` or
``{"error": "..."}``.

Levels, of which ``local.py`` chooses the strongest that the system allows:

    namespace  own user (or user namespace), files, processes, network, IPC
    user       own user id, system call filter, Landlock
    process    system call filter, Landlock
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import sys
from contextlib import suppress
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import landlock
import syscalls as sc

MIB = 2**20


def main() -> NoReturn:
    job = json.loads(sys.argv[1])
    status_fd = job["status_fd"]
    # If the trainer is killed, its children must end too. A process namespace ends with its first
    # process; without one, the program's children are ended here.
    if job["level"] == "namespace":
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        signal.signal(signal.SIGTERM, _end_group)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)
    os.umask(0o022)
    try:
        if job["level"] == "namespace":
            _in_namespaces(job)
        else:
            _without_namespaces(job)
    except OSError as error:
        _say(status_fd, {"error": str(error)})
        os._exit(1)
    os._exit(0)


def _end_group(number: int, frame: object) -> None:
    """End the launcher and its children: a program cannot leave its process group."""
    os.killpg(0, signal.SIGKILL)


def _say(status_fd: int, message: dict[str, Any]) -> None:
    os.write(status_fd, (json.dumps(message) + "\n").encode())


def unshare(job: dict[str, Any]) -> None:
    """Give the children of this process their own namespaces."""
    flags = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
    if os.geteuid() == 0:
        sc.unshare(flags)
    else:
        uid, gid = os.geteuid(), os.getegid()
        sc.unshare(flags | sc.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{job['uid']} {uid} 1")
        _write("/proc/self/gid_map", f"{job['uid']} {gid} 1")


def _in_namespaces(job: dict[str, Any]) -> None:
    unshare(job)
    init = os.fork()
    if init == 0:
        # Process 1 of the new namespace: when it ends, the kernel ends all the others.
        try:
            sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
            out_fd = os.open(job["out_dir"], os.O_RDONLY | os.O_DIRECTORY)
            build_root(job)
            _run(job, "/work", out_fd)
        except OSError as error:
            _say(job["status_fd"], {"error": str(error)})
        os._exit(0)
    os.waitpid(init, 0)


def _without_namespaces(job: dict[str, Any]) -> None:
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER)
    out_fd = os.open(job["out_dir"], os.O_RDONLY | os.O_DIRECTORY)
    if job["level"] == "user":
        for folder, _, files in os.walk(job["work_dir"]):
            for path in (folder, *(os.path.join(folder, f) for f in files)):
                os.chown(path, job["uid"], job["uid"])
    _run(job, job["work_dir"], out_fd)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(job: dict[str, Any]) -> None:
    """A root folder with the system's programs, read-only, and no other files."""
    root = job["root_dir"]
    sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    size = job["limits"]["file_size_mib"]
    sc.mount(
        "tmpfs", root, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, f"size={size}m,nr_inodes=16384,mode=755"
    )
    for path in job["read_only_paths"]:
        _show_read_only(root, path)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name in ("null", "zero", "full", "random", "urandom"):
        _touch(f"{root}/dev/{name}")
        sc.mount(f"/dev/{name}", f"{root}/dev/{name}", None, sc.MS_BIND)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        os.symlink(target, f"{root}/dev/{name}")
    for folder in ("tmp", "dev/shm"):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
        os.chmod(f"{root}/{folder}", 0o1777)
    os.makedirs(f"{root}/etc", exist_ok=True)
    _write(f"{root}/etc/passwd", f"sandbox:x:{job['uid']}:{job['uid']}::/work:/bin/sh\n")
    _copy_tree(job["work_dir"], f"{root}/work", job["uid"])
    os.makedirs(f"{root}/proc", exist_ok=True)
    # Some containers forbid it, and programs run without it.
    with suppress(OSError):
        sc.mount("proc", f"{root}/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
    os.makedirs(f"{root}/.old", exist_ok=True)
    sc.pivot_root(root, f"{root}/.old")
    os.chdir("/")
    sc.detach("/.old")
    os.rmdir("/.old")


def _show_read_only(root: str, path: str) -> None:
    target = root + path
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        _touch(target)
    try:
        sc.mount(path, target, None, sc.MS_BIND)
    except OSError:
        # In a user namespace, a folder with mounts can only be bound recursively.
        sc.mount(path, target, None, sc.MS_BIND | sc.MS_REC)
    # A remount must keep the mount's flags, or the kernel refuses it.
    kept = os.statvfs(path).f_flag & (sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC | 0x400 | 0x800)
    sc.mount(
        "none",
        target,
        None,
        sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV | kept,
    )


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _copy_tree(source: str, target: str, uid: int) -> None:
    os.makedirs(target, exist_ok=True)
    os.chown(target, uid, uid)
    for entry in os.scandir(source):
        if entry.is_dir(follow_symlinks=False):
            _copy_tree(entry.path, f"{target}/{entry.name}", uid)
            continue
        with open(entry.path, "rb") as file, open(f"{target}/{entry.name}", "wb") as copy:
            while block := file.read(MIB):
                copy.write(block)
        os.chmod(f"{target}/{entry.name}", entry.stat().st_mode & 0o777)
        os.chown(f"{target}/{entry.name}", uid, uid)


def _run(job: dict[str, Any], folder: str, out_fd: int) -> None:
    """Start the program, wait for it, collect its files, and report how it ended."""
    failed_read, failed_write = os.pipe()  # closed by a successful exec
    # Opened before the program can replace the folder.
    work_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    _say(job["status_fd"], {"started": True})
    program = os.fork()
    if program == 0:
        try:
            _become_program(job, folder, failed_write)
        except BaseException as error:
            os.write(failed_write, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    os.close(failed_write)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            break
    failure = os.read(failed_read, 4096)
    if failure:
        _say(job["status_fd"], {"error": failure.decode("utf-8", "replace")})
        return
    if job["level"] == "user":
        _kill_user(job["uid"])
    for name in job["collect"]:
        _collect(work_fd, name, out_fd, job["limits"]["file_size_mib"] * MIB)
    _say(
        job["status_fd"],
        {
            "exit": os.waitstatus_to_exitcode(status),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "max_rss_kib": usage.ru_maxrss,
        },
    )


def _become_program(job: dict[str, Any], folder: str, keep_fd: int) -> NoReturn:
    os.chdir(folder)
    os.set_inheritable(keep_fd, False)
    # Close all our descriptors, including the status pipe and the folder for collected files.
    os.closerange(3, keep_fd)
    os.closerange(keep_fd + 1, max(keep_fd + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    drop_rights(job)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them; programs expect the default
    if job["level"] == "namespace":
        # The namespaces alone are enough; without them the filter is required.
        with suppress(OSError):
            sc.install_seccomp(job["level"])
    else:
        if job["landlock"]:
            landlock.restrict(
                [*job["read_only_paths"], "/dev/random", "/dev/urandom"],
                [folder, "/dev/null", "/dev/zero", "/dev/full"],
            )
        sc.install_seccomp(job["level"])
    os.execve(job["argv"][0], job["argv"], job["env"])


def drop_rights(job: dict[str, Any]) -> None:
    """Change to the sandbox's user id and set the limits; nothing can be gained from here on."""
    limits = job["limits"]
    if os.geteuid() == 0 and job["level"] != "process":
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    # Without a process namespace, nothing else ends the program when the trainer is killed.
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = limits["memory_mib"] * MIB
    settings = [
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_FSIZE, limits["file_size_mib"] * MIB, limits["file_size_mib"] * MIB),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_NPROC, job["process_limit"], job["process_limit"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        # Timers and queued signals, which the kernel counts per user.
        (resource.RLIMIT_SIGPENDING, 256, 256),
        (resource.RLIMIT_STACK, int(memory * job["stack_share"]), int(memory * job["stack_share"])),
    ]
    if job["limit_address_space"]:
        settings.append((resource.RLIMIT_AS, memory, memory))
    for what, soft, hard in settings:
        top = resource.getrlimit(what)[1]
        if top != resource.RLIM_INFINITY:
            soft, hard = min(soft, top), min(hard, top)
        resource.setrlimit(what, (soft, hard))
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS)


def _kill_user(uid: int) -> None:
    """End every process of this user id, which belongs to this sandbox alone."""
    killer = os.fork()
    if killer == 0:
        os.setresuid(uid, uid, uid)
        with suppress(OSError):  # There may be none.
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    while os.wait()[0] != killer:
        pass


def _open_inside(folder_fd: int, name: str) -> int:
    """Open a file below a folder without following links. Raises OSError: it does not exist, or a
    link is in its path."""
    *folders, last = [part for part in name.split("/") if part not in ("", ".")]
    at = os.dup(folder_fd)
    try:
        for part in folders:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


def _collect(work_fd: int, name: str, out_fd: int, limit_bytes: int) -> None:
    """Copy one file out. It is untrusted: it may be a link, a pipe or endless."""
    try:
        source = _open_inside(work_fd, name)
    except OSError:
        return
    try:
        found = os.fstat(source)
        # A hard link may point to a file that the program must not read.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            return
        target = os.open(
            name.replace("/", "_"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o755, dir_fd=out_fd
        )
        with os.fdopen(target, "wb") as copy:
            left = limit_bytes
            while left > 0 and (block := os.read(source, min(left, MIB))):
                copy.write(block)
                left -= len(block)
    finally:
        os.close(source)


if __name__ == "__main__":
    main()
