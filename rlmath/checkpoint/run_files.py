"""A run folder's files besides its checkpoints, to and from a remote folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmath.checkpoint.remote import RemoteError, RemoteFolder
from rlmath.checkpoint.remote_owner import OWNER_FILE, Claim
from rlmath.checkpoint.transfer import FOLDERS, again
from rlmath.utils.run_lock import LOCK_FILE

# Folder of the mirror in the run's folder; nothing in it is uploaded.
OWN_FOLDER = ".mirror"
# Checkpoints are uploaded as such. Journal and kept batches are many GiB that only the machine that
# runs can use.
_LEFT_OUT = (*FOLDERS, OWN_FOLDER, OWNER_FILE, LOCK_FILE, "journal", "replay")
# A continued run writes them again; it exports at its end, also where that end was reached before.
_NOT_DOWNLOADED = (
    *("hf", "hf_adapter", "exported.json", "sft", "sft_adapter", "sft_exported.json", "logs"),
)
# A file that may grow meanwhile is uploaded from a copy, unless it is larger.
_COPY_BYTES = 16 * 2**20
_PER_BATCH = 32
_State = tuple[int, int]


class RunFiles:
    """Uploads those that have changed since they were uploaded last."""

    def __init__(self, run_dir: Path, claim: Claim, there: Mapping[str, int]) -> None:
        self._run_dir, self._claim, self._remote = run_dir, claim, claim.remote
        self._index = run_dir / OWN_FOLDER / "files.json"
        # Size in bytes and modification time, in ns, of each uploaded file.
        self._sent = {n: s for n, s in self._read_index().items() if there.get(n) == s[0]}

    def upload(self) -> None:
        """Upload new and changed files, and compare sizes. Raises RemoteError: a file could not be
        uploaded."""
        changed = {n: s for n, s in self._states().items() if self._sent.get(n) != s}
        names = sorted(changed)
        for begin in range(0, len(names), _PER_BATCH):
            self._upload(names[begin : begin + _PER_BATCH], changed)
        if not changed:
            return
        there = self._remote.sizes()
        # One that is uploaded where it is may have grown.
        short = [n for n in names if n in self._sent and there.get(n, -1) < self._sent[n][0]]
        for name in short:
            del self._sent[name]
        content = {"start": self._claim.owner.start, "files": self._sent}
        self._index.write_text(json.dumps(content), encoding="utf-8")
        if short:
            raise RemoteError(
                f"{self._remote.url}: {short[0]} has {there.get(short[0])} bytes there and "
                f"{changed[short[0]][0]} here"
            )

    def _upload(self, names: list[str], states: Mapping[str, _State]) -> None:
        copies = self._run_dir / OWN_FOLDER / "files"
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir(parents=True)
        files = {}
        for number, name in enumerate(names):
            path = self._run_dir / name
            # It may be gone by now: old samples are deleted.
            with contextlib.suppress(FileNotFoundError):
                if states[name][0] <= _COPY_BYTES:
                    path = Path(shutil.copyfile(path, copies / str(number)))
                path.stat()
                files[name] = path
        try:
            self._remote.put(files, lambda name: self._sent.update({name: states[name]}))
        finally:
            shutil.rmtree(copies, ignore_errors=True)

    def _states(self) -> dict[str, _State]:
        found = {}
        for name in _files_in(self._run_dir):
            with contextlib.suppress(FileNotFoundError):
                stat = (self._run_dir / name).stat()
                found[name] = (stat.st_size, stat.st_mtime_ns)
        return found

    def _read_index(self) -> dict[str, _State]:
        """Uploads of the run's last start; none when another place mirrored it since."""
        try:
            content = json.loads(self._index.read_text(encoding="utf-8"))
            if content["start"] == self._claim.earlier:
                return {name: (int(a), int(b)) for name, (a, b) in content["files"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}


def download_run_files(remote: RemoteFolder, run_dir: Path) -> int:
    """Download a run's files besides its checkpoints; those that are there are replaced."""
    sizes = again(remote.sizes)
    wanted = {n: s for n, s in sizes.items() if _is_wanted(n, (*_LEFT_OUT, *_NOT_DOWNLOADED))}
    again(lambda: remote.get(wanted, run_dir))
    return len(wanted)


def _is_wanted(name: str, left_out: tuple[str, ...] = _LEFT_OUT) -> bool:
    parts = name.split("/")
    return (
        parts[0] not in left_out
        and "set_aside_" not in parts[0]
        # Temporary files of atomic writes.
        and not any(part.startswith(".") for part in parts)
    )


def _files_in(run_dir: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(run_dir):
        inside = os.path.relpath(parent, run_dir)
        prefix = "" if inside == "." else f"{inside}/"
        folders[:] = sorted(one for one in folders if _is_wanted(prefix + one))
        for name in sorted(names):
            if _is_wanted(prefix + name) and not os.path.islink(os.path.join(parent, name)):
                yield prefix + name
