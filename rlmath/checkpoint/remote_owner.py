"""The run that a remote folder belongs to: only one is mirrored to it.

A run's id is made once and stays in its folder. In the remote folder, ``mirror.json`` has it, and
a token of the run's last start: an earlier start that is still active elsewhere sees another token
and leaves the folder alone.
"""

from __future__ import annotations

import datetime
import json
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmath.checkpoint.manifest import MANIFEST
from rlmath.checkpoint.remote import RemoteError, RemoteFolder
from rlmath.checkpoint.transfer import FOLDERS, newest_manifest
from rlmath.errors import UserError

OWNER_FILE = "mirror.json"


class NotOurs(UserError):
    """The remote folder belongs to another run, or to a later start of this one."""


@dataclass(frozen=True)
class Owner:
    run: str
    start: str
    place: str
    started: str


def own_id(run_dir: Path) -> str | None:
    """The id of the run in a folder; ``None``: it has none yet."""
    try:
        return str(json.loads((run_dir / OWNER_FILE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_id(run_dir: Path, run: str) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / OWNER_FILE).write_text(json.dumps({"run": run}) + "\n", encoding="utf-8")


def owner_of(remote: RemoteFolder) -> Owner | None:
    """The run that a remote folder belongs to; ``None``: to none. Raises RemoteError: it cannot be
    read."""
    try:
        found = json.loads(remote.read(OWNER_FILE))
        return Owner(**{name: str(found[name]) for name in Owner.__dataclass_fields__})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise RemoteError(f"{remote.url}/{OWNER_FILE} is damaged; delete it") from None


def refusal(remote: RemoteFolder, run_dir: Path) -> str | None:
    """The reason why the run in a folder may not be mirrored to a remote one; ``None``: it may."""
    owner = owner_of(remote)
    if owner is None:
        if names := remote.names():
            return f"holds {names[0]} and no run; give an empty folder"
        return None
    if owner.run != own_id(run_dir):
        return (
            f"holds another run, of {owner.place}, last started {owner.started}; give another "
            f"folder, or continue that run with runner.resume={remote.url}"
        )
    for folder in FOLDERS:
        newest = newest_manifest(remote, folder)
        if newest is not None and not _is_superseded(run_dir / folder, *newest):
            return (
                f"holds step {newest[0]} of this run, which {run_dir / folder} lacks: "
                f"runner.resume={remote.url} continues from it; or give another folder"
            )
    return None


def _is_superseded(folder: Path, step: int, manifest: bytes) -> bool:
    """Whether the run has a checkpoint as new as a remote one, or set that one aside."""
    newest = max(
        (int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdigit()), default=0
    )
    return newest >= step or any(is_manifest(p, manifest) for p in copies_of(folder, step))


def copies_of(folder: Path, step: int) -> Iterator[Path]:
    """Where a step's checkpoint may be: in the run's folder of them, and set aside."""
    name = f"step_{step:06d}"
    yield folder / name
    yield from (path / name for path in folder.parent.glob(f"{folder.name}_set_aside_*"))


def is_manifest(checkpoint: Path, manifest: bytes) -> bool:
    try:
        return (checkpoint / MANIFEST).read_bytes() == manifest
    except OSError:
        return False


@dataclass(frozen=True)
class Claim:
    """A start that mirrors to a remote folder."""

    remote: RemoteFolder
    owner: Owner
    # Token of the run's last start that mirrored to it; None: this is the first.
    earlier: str | None

    def check(self) -> None:
        """Raise ``NotOurs`` when another start has claimed the folder since."""
        now = owner_of(self.remote)
        if now is None or now.start != self.owner.start:
            by = "deleted" if now is None else f"taken over by {now.place} at {now.started}"
            raise NotOurs(f"{self.remote.url} was {by}; this run no longer writes there")


def claim(remote: RemoteFolder, run_dir: Path) -> Claim:
    """Take a remote folder for the run in a folder. Raises NotOurs: it may not be mirrored there;
    RemoteError: the folder cannot be read or written."""
    if reason := refusal(remote, run_dir):
        raise NotOurs(f"runner.mirror={remote.url}: {reason}")
    before = owner_of(remote)
    run = own_id(run_dir) or uuid.uuid4().hex
    keep_id(run_dir, run)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    place = f"{socket.gethostname()}:{run_dir.absolute()}"
    owner = Owner(run, uuid.uuid4().hex, place, now)
    remote.write(OWNER_FILE, (json.dumps(asdict(owner)) + "\n").encode())
    taken = Claim(remote, owner, before.start if before else None)
    # Two runs that start at the same moment both see an empty folder.
    taken.check()
    return taken
