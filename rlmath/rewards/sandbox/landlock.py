"""Landlock (Linux 5.13 or later): a process permanently gives up all files except those listed.

It needs no privilege, so it hides files where namespaces are unavailable. Like ``syscalls.py`` it
imports only the standard library, because it runs inside the launcher.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# Number of rights in each version of the interface: 13 at first, then refer, truncate, ioctl.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Version of the kernel's Landlock interface; 0 if there is none, or it is disabled."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Keep access to these folders and files only. Requires no_new_privs. Raises OSError: the
    kernel refused."""
    known = version()
    everything = (1 << _RIGHTS[min(known, 5)]) - 1
    parts = [everything]
    if known >= 4:
        parts.append(0)  # network: denied by the system call filter
    if known >= 6:
        parts.append(_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    attributes = struct.pack(f"{len(parts)}Q", *parts)
    rules = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        _allow(rules, path, everything & (_EXECUTE | _READ_FILE | _READ_DIR))
    for path in writable:
        _allow(rules, path, everything)
    _call(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        _call(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
