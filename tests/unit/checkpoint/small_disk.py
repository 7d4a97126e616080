"""A disk that is small enough to run full."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(where, size_kib):
    """An empty file system of that size in a new folder; skips the test where that takes rights.

    Leaving it fails while a process still holds a file of it open.
    """
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "rlmath-test", str(where)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(
            f"a full disk needs a small file system, which takes root: {done.stderr.strip()}"
        )
    try:
        yield where
    finally:
        done = subprocess.run(["umount", str(where)], capture_output=True, text=True)
        if done.returncode != 0:
            # Out of the way of everything else all the same.
            subprocess.run(["umount", "--lazy", str(where)], check=True)
    assert done.returncode == 0, done.stderr
