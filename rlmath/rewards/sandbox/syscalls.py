"""System calls for which Python 3.11 has no function. Runs inside the launcher.

Imports only the standard library, because the launcher runs a Python without the environment's
packages.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_ALL_NAMESPACES = 0x7E020000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)

# System call numbers of the two supported architectures.
_NUMBERS = {
    "x86_64": {
        "clone": 56, "socket": 41, "kill": 62, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "setsid": 112, "setpgid": 109,
        "pivot_root": 155, "ptrace": 101, "mount": 165, "umount2": 166, "chroot": 161,
        "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248, "request_key": 249,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310,
        "process_vm_writev": 311, "open_by_handle_at": 304, "name_to_handle_at": 303,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
        "delete_module": 176, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163,
        "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "quotactl": 179,
        "syslog": 103, "iopl": 172, "ioperm": 173, "prlimit64": 302, "setpriority": 141,
        "ioprio_set": 251, "sched_setaffinity": 203, "sched_setscheduler": 144,
        "sched_setparam": 142, "sched_setattr": 314, "kcmp": 312, "migrate_pages": 256,
        "move_pages": 279, "get_robust_list": 274, "shmget": 29, "shmat": 30, "shmctl": 31,
        "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68,
        "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241, "fcntl": 72,
        "ioctl": 16, "prctl": 157, "memfd_create": 319, "sendmsg": 46, "sendmmsg": 307,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
        "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
        "lremovexattr": 198, "fremovexattr": 199, "truncate": 76, "inotify_init": 253,
        "inotify_init1": 294, "fanotify_init": 300, "sync": 162, "syncfs": 306,
    },
    "aarch64": {
        "clone": 220, "socket": 198, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "setsid": 157, "setpgid": 154,
        "pivot_root": 41, "ptrace": 117, "mount": 40, "umount2": 39, "chroot": 51,
        "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217, "request_key": 218,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "process_vm_readv": 270,
        "process_vm_writev": 271, "open_by_handle_at": 265, "name_to_handle_at": 264,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89,
        "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "quotactl": 60,
        "syslog": 116, "prlimit64": 261, "setpriority": 140, "ioprio_set": 30,
        "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118,
        "sched_setattr": 274, "kcmp": 272, "migrate_pages": 238, "move_pages": 239,
        "get_robust_list": 100, "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197,
        "semget": 190, "semop": 193, "semctl": 191, "semtimedop": 192, "msgget": 186,
        "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180, "mq_unlink": 181,
        "fcntl": 25, "ioctl": 29, "prctl": 167, "memfd_create": 279, "sendmsg": 211,
        "sendmmsg": 269, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54,
        "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14,
        "lremovexattr": 15, "fremovexattr": 16, "truncate": 45, "inotify_init1": 26,
        "fanotify_init": 262, "sync": 81, "syncfs": 267,
    },
}  # fmt: skip
# The same on both architectures.
_COMMON = {
    "clone3": 435, "io_uring_setup": 425, "pidfd_send_signal": 424, "pidfd_getfd": 438,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "pidfd_open": 434, "process_madvise": 440, "process_mrelease": 448, "fchmodat2": 452,
    "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# A program that reads its input and prints its answer needs none of these.
_DENIED = (
    "socket", "ptrace", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "keyctl",
    "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "process_vm_readv",
    "process_vm_writev", "open_by_handle_at", "name_to_handle_at", "kexec_load",
    "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon",
    "swapoff", "acct", "settimeofday", "clock_settime", "adjtimex", "quotactl", "syslog", "iopl",
    "ioperm", "pidfd_getfd", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount",
    "fspick", "mount_setattr", "quotactl_fd", "process_madvise", "process_mrelease", "kcmp",
    "migrate_pages", "move_pages", "get_robust_list",
    # Memory that no process has mapped counts against no limit; System V objects outlive it.
    "shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "msgget",
    "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink", "memfd_create", "memfd_secret",
    # The kernel counts watches per user; sync and syncfs write out everybody's dirty pages.
    "inotify_init", "inotify_init1", "fanotify_init", "sync", "syncfs",
)  # fmt: skip
# Without its own namespace a program must not signal others or leave its process group. The size
# of an open file inside a message in flight (sendmsg) cannot be determined.
_DENIED_WITHOUT_NAMESPACE = (
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal",
    "pidfd_open", "setsid", "setpgid", "sendmsg", "sendmmsg",
)  # fmt: skip
# Under the trainer's user id: Landlock protects the contents of files, but not their metadata
# (truncation only since Linux 6.2).
_DENIED_AS_TRAINER = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime",
    "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "file_setattr", "truncate",
)  # fmt: skip
# Calls that name a process, 0 being the caller: (argument, required value). A filter does not know
# the ids of the program's children, so its own id is refused too.
_ONLY_ITSELF = {
    "prlimit64": ((0, 0),),
    "setpriority": ((0, 0), (1, 0)),  # PRIO_PROCESS
    "ioprio_set": ((0, 1), (1, 0)),  # IOPRIO_WHO_PROCESS
    "sched_setaffinity": ((0, 0),),
    "sched_setscheduler": ((0, 0),),
    "sched_setparam": ((0, 0),),
    "sched_setattr": ((0, 0),),
}
# Calls with many uses: (argument, denied values).
# F_SETPIPE_SZ: the kernel counts pipe pages per user. F_SETLEASE: blocks whoever opens the
# trainer's file for writing.
_FCNTL = (1031, 1024)
_DENIED_USES: dict[str, tuple[int, tuple[int, ...]]] = {"fcntl": (1, _FCNTL)}
_DENIED_USES_WITHOUT_NAMESPACE = {
    # F_SETOWN, F_SETSIG, F_SETOWN_EX: make the kernel send a signal.
    "fcntl": (1, (8, 10, 15, *_FCNTL)),
    # FIOSETOWN, SIOCSPGRP: the same. FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR,
    # FS_IOC_SETVERSION, EXT4_IOC_SETVERSION: change a file without opening it for writing.
    "ioctl": (
        1, (0x8901, 0x8902, 0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40086604)
    ),
    "prctl": (0, (PR_SET_DUMPABLE,)),  # would hide its open files from the disk limit
}  # fmt: skip


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            data.encode(),
        ),
        f"mount {kind or source} on {target}",
    )


def detach(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    number = _NUMBERS[platform.machine()]["pivot_root"]
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


def prctl(option: int, value: int = 1) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Give up all capabilities; they are lost automatically only when root changes its user id."""
    version_3 = 0x20080522
    _check(_libc.capset(struct.pack("Ii", version_3, 0), bytes(24)), "capset")


@functools.cache
def seccomp_filter(machine: str, level: str) -> bytes:
    """The BPF program that denies system calls that a solution never needs. Returns 8 bytes per
    instruction.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        level: ``namespace``: the program is alone in its process namespace, so it may signal and
            group its own processes. ``user``: it shares the machine's processes. ``process``: it
            also has the trainer's user id.
    """
    load, jump_eq, jump_ge, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, errno = 0x7FFF0000, 0x00050000
    eperm, eacces, enosys = errno | 1, errno | 13, errno | 38
    numbers = {**_NUMBERS[machine], **_COMMON}
    program = [
        (load, 0, 0, 4),  # the architecture of the call
        (jump_eq, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, eperm),
        (load, 0, 0, 0),  # its number
    ]
    if machine == "x86_64":
        # The x32 calls are the same calls under other numbers.
        program += [(jump_ge, 0, 1, 0x40000000), (give, 0, 0, eperm)]
    alone = level == "namespace"
    denied: tuple[str, ...] = _DENIED if alone else _DENIED + _DENIED_WITHOUT_NAMESPACE
    if level == "process":
        denied += _DENIED_AS_TRAINER
    answers = {name: eperm for name in denied if name in numbers}
    answers["socket"] = eacces
    # "Not implemented" makes the C library fall back to clone, whose flags can be inspected.
    answers["clone3"] = enosys
    answers["io_uring_setup"] = enosys
    for name, answer in answers.items():
        program += [(jump_eq, 0, 1, numbers[name]), (give, 0, 0, answer)]
    first_argument = 16  # 8 bytes each, the low half first; only 32 bits are compared
    if not alone:
        for name, wanted in _ONLY_ITSELF.items():
            program.append((jump_eq, 0, 2 * len(wanted) + 2, numbers[name]))
            for done, (argument, value) in enumerate(wanted):
                program += [
                    (load, 0, 0, first_argument + 8 * argument),
                    (jump_eq, 0, 2 * (len(wanted) - done) - 1, value),
                ]
            program += [(give, 0, 0, allow), (give, 0, 0, eperm)]
    uses = _DENIED_USES if alone else _DENIED_USES_WITHOUT_NAMESPACE
    for name, (argument, values) in uses.items():
        program.append((jump_eq, 0, len(values) + 3, numbers[name]))
        program.append((load, 0, 0, first_argument + 8 * argument))
        program += [(jump_eq, len(values) - done, 0, value) for done, value in enumerate(values)]
        program += [(give, 0, 0, allow), (give, 0, 0, eperm)]
    program += [
        (jump_eq, 0, 3, numbers["clone"]),
        (load, 0, 0, first_argument),  # its flags
        (jump_set, 0, 1, _ALL_NAMESPACES),
        (give, 0, 0, eperm),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_seccomp(level: str) -> None:
    """Deny these calls permanently, in this process and its children. Raises OSError: the kernel
    has no seccomp, or the architecture is unknown."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise OSError(0, f"no system call numbers for {machine}")
    code = seccomp_filter(machine, level)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    fprog = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_NO_NEW_PRIVS)
    mode_filter = 2
    _check(_libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.byref(fprog), 0, 0), "prctl seccomp")
