"""Shared memory that does not suffice is said before a write to it would kill the process."""

import os

import pytest

from rlmath.errors import UserError
from rlmath.weights.transports import segments


def ours():
    return [name for name in os.listdir(segments.FOLDER) if name.startswith("rlmath_full")]


def test_full_shared_memory_is_an_error_with_the_arithmetic():
    stat = os.statvfs(segments.FOLDER)
    each = stat.f_bavail * stat.f_frsize // 2 + 2**20
    with pytest.raises(UserError, match=r"(?s)shared memory, but /dev/shm has .*bucket_size_mib"):
        segments.NamedSegments("full", [each, each])
    assert not ours()


def test_shared_memory_that_another_process_takes_first(monkeypatch):
    monkeypatch.setattr(segments, "_refuse_unless_free", lambda sizes_bytes: None)
    stat = os.statvfs(segments.FOLDER)
    # More than there is at all: the kernel refuses it without filling it.
    with pytest.raises(UserError, match=r"make /dev/shm larger"):
        segments.NamedSegments("full", [stat.f_blocks * stat.f_frsize + 2**20])
    assert not ours()
