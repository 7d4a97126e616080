"""Checkpoints to and from a remote folder.

Files first, the manifest last: a checkpoint without a manifest is an upload that was cut off. One
with a manifest is compared with it, sizes before the download and checksums after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import xxhash

from rlmath.checkpoint.manifest import MANIFEST, BrokenCheckpoint, Manifest, read_manifest, verify
from rlmath.checkpoint.remote import RemoteError, RemoteFolder
from rlmath.checkpoint.space import require_free
from rlmath.checkpoint.store import STEP_NAME, CheckpointStore, Skipped

T = TypeVar("T")

# Folders of ``rlmath train`` and ``rlmath sft`` in a run's folder.
FOLDERS = ("checkpoints", "sft_checkpoints")
# A larger file is compared by size: reading it back costs as much as the upload, and on most
# stores money. A download compares the checksums of all.
_READ_BACK_BYTES = 16 * 2**20
_PER_BATCH = 64
_TRIES, _FIRST_PAUSE_S = 5, 5.0


def upload_checkpoint(
    remote: RemoteFolder,
    folder: Path,
    name: str,
    sent: set[str],
    vouch: Callable[[], None] = lambda: None,
) -> None:
    """Upload a checkpoint and compare the uploaded files; its manifest is written last.

    Args:
        sent: Files that an earlier call for the same checkpoint uploaded; it is added to.
        vouch: Called before the manifest is written; may raise.

    Raises:
        RemoteError: It was not uploaded; there is no manifest then.
        FileNotFoundError: A local file is gone.
    """
    manifest, data = read_manifest(folder), (folder / MANIFEST).read_bytes()
    # The manifest of an older checkpoint of the same step must not vouch for these files.
    remote.delete_file(f"{name}/{MANIFEST}")
    left = sorted(manifest.files.keys() - sent, key=lambda file: -manifest.files[file][0])
    for begin in range(0, len(left), _PER_BATCH):
        batch = {f"{name}/{file}": folder / file for file in left[begin : begin + _PER_BATCH]}
        remote.put(batch, lambda file: sent.add(file.removeprefix(f"{name}/")))
    sizes = remote.sizes(name)
    for file, (size, digest) in manifest.files.items():
        problem = ""
        if sizes.get(file) != size:
            problem = f"has {sizes.get(file)} bytes there and {size} here"
        elif size <= _READ_BACK_BYTES and _digest(remote, f"{name}/{file}") != digest:
            problem = "has another checksum there than here"
        if problem:
            sent.discard(file)
            raise RemoteError(f"{remote.url}: {name}/{file} {problem}")
    vouch()
    remote.write(f"{name}/{MANIFEST}", data)
    if remote.read(f"{name}/{MANIFEST}") != data:
        raise RemoteError(f"{remote.url}: {name}/{MANIFEST} differs from what was written")


def _digest(remote: RemoteFolder, name: str) -> str:
    try:
        return str(xxhash.xxh3_128(remote.read(name)).hexdigest())
    except FileNotFoundError:
        return ""


def delete_checkpoint(remote: RemoteFolder, name: str) -> None:
    """Delete a checkpoint, its manifest first."""
    remote.delete_file(f"{name}/{MANIFEST}")
    remote.delete_folder(name)


def checkpoints_in(remote: RemoteFolder, folder: str) -> dict[int, dict[str, int]]:
    """Sizes of the files of each checkpoint below a remote folder, complete or not, by step."""
    found: dict[int, dict[str, int]] = {}
    for name, size in remote.sizes(folder).items():
        step, _, file = name.partition("/")
        if file and (match := STEP_NAME.fullmatch(step)):
            found.setdefault(int(match[1]), {})[file] = size
    return found


def newest_manifest(remote: RemoteFolder, folder: str) -> tuple[int, bytes] | None:
    """Step and manifest of the newest checkpoint below a remote folder that has one."""
    for step, files in sorted(checkpoints_in(remote, folder).items(), reverse=True):
        if MANIFEST in files:
            return step, remote.read(f"{folder}/step_{step:06d}/{MANIFEST}")
    return None


def download_newest(
    remote: RemoteFolder, folder: str, store: CheckpointStore, step: int | None = None
) -> tuple[Path | None, list[Skipped]]:
    """Make a local checkpoint of the newest complete one below a remote folder. Returns the
    checkpoint, or ``None``; and those that are not complete, newest first.

    Args:
        step: Take this one alone; ``None``: the newest that is complete.

    Raises:
        RemoteError: The remote folder failed repeatedly. None is skipped for that.
        DiskFull: There is no room for it.
    """
    skipped: list[Skipped] = []
    there = again(lambda: checkpoints_in(remote, folder))
    for number in sorted(there, reverse=True):
        if step is not None and number != step:
            continue
        name = f"{folder}/step_{number:06d}"
        try:
            return _download(remote, name, number, there[number], store), skipped
        except BrokenCheckpoint as error:
            skipped.append(Skipped(Path(name), str(error)))
        finally:
            store.abandon(number)
    return None, skipped


def _download(
    remote: RemoteFolder, name: str, step: int, sizes: Mapping[str, int], store: CheckpointStore
) -> Path:
    if MANIFEST not in sizes:
        raise BrokenCheckpoint(f"{MANIFEST} is missing: its upload was not finished")
    partial = store.begin(step)
    try:
        again(lambda: remote.get({MANIFEST: sizes[MANIFEST]}, partial, name))
        manifest = read_manifest(partial)
        for file, (size, _) in manifest.files.items():
            if file not in sizes:
                raise BrokenCheckpoint(f"{file} is missing")
            if sizes[file] != size:
                raise BrokenCheckpoint(f"{file} has {sizes[file]} bytes instead of {size}")
        require_free(store.path(step), manifest.num_bytes)
        again(lambda: remote.get(_missing_sizes(manifest, partial), partial, name))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{error} is missing") from None
    verify(partial)
    return store.adopt(step)


def _missing_sizes(manifest: Manifest, folder: Path) -> dict[str, int]:
    """Sizes of the files that a download still has to get."""
    return {
        file: size
        for file, (size, _) in manifest.files.items()
        if not (folder / file).is_file() or (folder / file).stat().st_size != size
    }


def again(call: Callable[[], T]) -> T:
    """Make a remote call, and retry with growing pauses; raises the last error."""
    for tries in range(_TRIES):
        try:
            return call()
        except RemoteError as error:
            if tries == _TRIES - 1:
                raise
            print(f"{error}; trying again", flush=True)
            time.sleep(_FIRST_PAUSE_S * 2**tries)
    raise AssertionError("unreachable")
