"""Landlock (Linux 5.13 on): a process gives up, for good, all files but those that it names.

It needs no privilege, so it hides the machine's files where namespaces are not to be had. Like
``syscalls.py`` it stands alone, for it runs inside the launcher.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# Rights that each version of the interface knows: 13 at first, then refer, truncate, ioctl.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Version of the kernel's interface; 0 when there is none, or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Keep these folders and files, and lose all others. Needs no_new_privs to be set.

    Args:
        readable: To read and to run.
        writable: To do anything with.

    Raises:
        OSError: The kernel refused.
    """
    known = version()
    everything = (1 << _RIGHTS[min(known, 5)]) - 1
    parts = [everything]
    if known >= 4:
        parts.append(0)  # network: the system call filter keeps that closed
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
