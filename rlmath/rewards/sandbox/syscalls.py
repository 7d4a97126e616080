"""Thin calls into the kernel that Python 3.11 has no function for. Runs inside the launcher.

It stands alone: the standard library only, nothing of rlmath, for the launcher starts a Python
without the environment's packages.
"""

from __future__ import annotations

import ctypes
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

# Numbers of the system calls, for the two machines on which models are trained.
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
        "syslog": 103, "iopl": 172, "ioperm": 173,
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
        "syslog": 116,
    },
}  # fmt: skip
# The same on both machines.
_COMMON = {
    "clone3": 435, "io_uring_setup": 425, "pidfd_send_signal": 424, "pidfd_getfd": 438,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "mount_setattr": 442,
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Never of use to a program that reads its input and prints its answer.
_DENIED = (
    "socket", "ptrace", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "keyctl",
    "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "process_vm_readv",
    "process_vm_writev", "open_by_handle_at", "name_to_handle_at", "kexec_load",
    "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon",
    "swapoff", "acct", "settimeofday", "clock_settime", "adjtimex", "quotactl", "syslog", "iopl",
    "ioperm", "pidfd_getfd", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount",
    "mount_setattr",
)  # fmt: skip
# Without a namespace of its own a program must not signal others, nor leave its process group.
_DENIED_WITHOUT_NAMESPACE = (
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal",
    "setsid", "setpgid",
)  # fmt: skip


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


def seccomp_filter(machine: str, own_namespaces: bool) -> bytes:
    """The BPF program that denies what a solution never needs.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        own_namespaces: The program is alone in its process namespace, so it may signal and group
            its own processes as it likes.

    Returns:
        8 bytes for each instruction.
    """
    load, jump_eq, jump_ge, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, errno = 0x7FFF0000, 0x00050000
    eperm, eacces, enosys = errno | 1, errno | 13, errno | 38
    numbers = {**_NUMBERS[machine], **_COMMON}
    program = [
        (load, 0, 0, 4),  # the machine that the call was made for
        (jump_eq, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, eperm),
        (load, 0, 0, 0),  # its number
    ]
    if machine == "x86_64":
        # The x32 calls are the same ones under other numbers.
        program += [(jump_ge, 0, 1, 0x40000000), (give, 0, 0, eperm)]
    denied = _DENIED if own_namespaces else _DENIED + _DENIED_WITHOUT_NAMESPACE
    answers = {name: eperm for name in denied if name in numbers}
    answers["socket"] = eacces
    # "Not there" makes the C library fall back to clone, whose flags can be looked at.
    answers["clone3"] = enosys
    answers["io_uring_setup"] = enosys
    for name, answer in answers.items():
        program += [(jump_eq, 0, 1, numbers[name]), (give, 0, 0, answer)]
    program += [
        (jump_eq, 0, 3, numbers["clone"]),
        (load, 0, 0, 16),  # its flags
        (jump_set, 0, 1, _ALL_NAMESPACES),
        (give, 0, 0, eperm),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def install_seccomp(own_namespaces: bool) -> None:
    """Deny for good, to this process and its children.

    Raises:
        OSError: The kernel has no seccomp, or this machine's numbers are not known.
    """
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise OSError(0, f"no system call numbers for {machine}")
    code = seccomp_filter(machine, own_namespaces)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    fprog = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_NO_NEW_PRIVS)
    mode_filter = 2
    _check(_libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.byref(fprog), 0, 0), "prctl seccomp")
