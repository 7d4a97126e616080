"""The list of a checkpoint's files with sizes and checksums, which shows if it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checkpoint.digests import ALGORITHM, SUFFIX, file_digest, take_note
from rlmath.errors import UserError

MANIFEST = "manifest.json"
_FORMAT = 2
# Hashing releases the interpreter lock, so threads hash in parallel: a resume waits for it, and a
# checkpoint of many ranks has many files.
_NUM_THREADS = min(32, 2 * len(os.sched_getaffinity(0)))


class BrokenCheckpoint(UserError):
    """An incomplete checkpoint: a file is missing, cut off, or not what was written."""


@dataclass(frozen=True)
class Manifest:
    step: int
    metrics: Mapping[str, float]
    created_unix_s: float  # Creation time, in seconds since 1970.
    # Size in bytes and checksum of each file, by its path relative to the checkpoint.
    files: Mapping[str, tuple[int, str]]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def write_manifest(folder: Path, step: int, metrics: Mapping[str, float]) -> Manifest:
    """Sync every file of ``folder`` to disk, then list them in its manifest.

    A rank's file has the checksum that the rank noted when it wrote it, see ``digests.py``. Raises
    ValueError: there is no file to list; OSError: a file has another size than its writer gave it.
    """
    paths = _files(folder)
    if not paths:
        raise ValueError(f"{folder} is empty; the ranks have to save into it before the commit")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(_sync_and_digest, (folder / path for path in paths)))
    manifest = Manifest(step, dict(metrics), time.time(), dict(zip(paths, digests, strict=True)))
    content = {
        "format": _FORMAT,
        "step": step,
        "metrics": dict(metrics),
        "created_unix_s": manifest.created_unix_s,
        "files": {
            path: {"size_bytes": size, ALGORITHM: digest}
            for path, (size, digest) in manifest.files.items()
        },
    }
    # The manifest vouches for the files; its own checksum vouches for the manifest.
    content["sha256"] = _digest_of(content)
    write_json(folder / MANIFEST, content)
    for inner in {(folder / path).parent for path in paths} | {folder}:
        sync(inner)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, without looking at the files. Raises BrokenCheckpoint: there is
    none, or it is not what was written."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        claimed = content.pop("sha256")
        if content["format"] != _FORMAT:
            raise BrokenCheckpoint(
                f"{path} has format {content['format']}; this version reads format {_FORMAT}"
            )
        if claimed != _digest_of(content):
            raise BrokenCheckpoint(f"{path} does not match its own checksum")
        files = {
            name: (int(entry["size_bytes"]), str(entry[ALGORITHM]))
            for name, entry in content["files"].items()
        }
        created_unix_s = float(content["created_unix_s"])
        return Manifest(int(content["step"]), content["metrics"], created_unix_s, files)
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error!r}") from None


def verify(folder: Path, share: tuple[int, int] = (0, 1), under: str = "") -> Manifest:
    """Compare files of a checkpoint with the manifest; each is read once by a process. Raises
    BrokenCheckpoint: a file is missing or not what was written; the message names it.

    Args:
        share: Index of this process, and the number of processes that divide the files.
        under: Only files below this folder.
    """
    manifest = read_manifest(folder)
    files = {n: entry for n, entry in manifest.files.items() if Path(n).is_relative_to(under)}
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise BrokenCheckpoint(f"{name} is missing")
        if path.stat().st_size != size:
            raise BrokenCheckpoint(f"{name} has {path.stat().st_size} bytes instead of {size}")

    def compare(name: str) -> str | None:
        try:
            digest = file_digest(folder / name)
            return None if digest == files[name][1] else f"{name}: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    number, processes = share
    largest_first = sorted(files, key=lambda name: (-files[name][0], name))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for problem in pool.map(compare, largest_first[number::processes]):
            if problem:
                raise BrokenCheckpoint(problem)
    return manifest


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file and sync it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[str]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != SUFFIX)
    return sorted(str(p.relative_to(folder)) for p in found if p != folder / MANIFEST)


def _sync_and_digest(path: Path) -> tuple[int, str]:
    sync(path)
    return take_note(path) or (path.stat().st_size, file_digest(path))


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
