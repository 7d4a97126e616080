from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

MIB = 2**20
MOST_FILES = 16384  # the same limit as the file system of level ``namespace``
_BLOCK_BYTES = 512  # the unit of st_blocks on Linux, whatever the file system


def disk_use_mib(
    folder: Path, processes: Iterable[int], file_size_mib: int, *, same_user: bool
) -> float:
    """Size of a folder plus the deleted files that processes keep open or mapped, in MiB.

    Args:
        file_size_mib: Limit of one file, counted for a deleted and mapped file whose size cannot
            be read.
        same_user: The program has this process's user id, so its open files are unreadable only
            if it hides them. Root without CAP_SYS_PTRACE cannot read any; they then count 0.

    Returns:
        The sum. Infinity with more than :data:`MOST_FILES` files, or if the program hides files:
        in a folder that cannot be listed, or nested deeper than the maximum path length.
    """
    sizes: dict[tuple[int, int], float] = {}
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES / MIB
                        if stat.S_ISDIR(found.st_mode):
                            folders.append(entry.path)
                    if len(sizes) > MOST_FILES:
                        return inf
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was deleted meanwhile.
        except OSError:
            return inf
    for process in processes:
        if not _add_open(sizes, process) and same_user and _runs(process):
            return inf
        _add_mapped(sizes, process, str(folder), file_size_mib)
    return sum(sizes.values())


def _add_open(sizes: dict[tuple[int, int], float], process: int) -> bool:
    """Add the deleted files that a process has open; returns whether they can be read."""
    try:
        descriptors = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            found = os.stat(f"/proc/{process}/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES / MIB
    return True


def _runs(process: int) -> bool:
    """Whether the process still has memory; a zombie has none."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[0]) > 0
    return False


def _add_mapped(
    sizes: dict[tuple[int, int], float], process: int, folder: str, file_size_mib: int
) -> None:
    with suppress(OSError, ValueError), open(f"/proc/{process}/maps", errors="replace") as maps:
        for line in maps:
            if not line.endswith(" (deleted)\n") or folder not in line:
                continue
            addresses, _, _, device, inode, _ = line.split(maxsplit=5)
            try:
                begin, _, end = addresses.partition("-")
                name = f"/proc/{process}/map_files/{int(begin, 16):x}-{int(end, 16):x}"
                found = os.stat(name)
            except OSError:
                major, _, minor = device.partition(":")
                key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
                sizes.setdefault(key, float(file_size_mib))
            else:
                sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES / MIB
