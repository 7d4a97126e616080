"""Whether ``runner.mirror`` names a folder that this run can be mirrored to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

from rlmath.checkpoint.remote import RemoteError, RemoteFolder, is_url, url_problem
from rlmath.checkpoint.remote_owner import refusal
from rlmath.config.schema import Config

_LIMIT_S = 30.0


def mirror_problems(config: Config, command: str) -> Iterator[str]:
    """Errors in the URL, without connecting."""
    url = config.runner.mirror
    if url is None or command == "evaluate":
        return
    if problem := url_problem(url, writes=True):
        yield f"runner.mirror={url}: {problem}"
        return
    scheme, _, path = url.partition("://")
    folder, run_dir = Path(path).absolute(), Path(config.runner.run_dir).absolute()
    if scheme in ("file", "local") and (
        folder in (run_dir, *run_dir.parents) or run_dir in folder.parents
    ):
        yield f"runner.mirror={url}: overlaps runner.run_dir={run_dir}; give a folder elsewhere"


def remote_problems(config: Config, command: str) -> Iterator[str]:
    """Whether the folder can be written, read and cleared, and belongs to no other run."""
    url = config.runner.mirror
    if url is None or command == "evaluate":
        return
    remote = RemoteFolder(url, limit_s=_LIMIT_S)
    try:
        _write_and_delete(remote)
        # A run that is still to be downloaded takes its id with it.
        if not is_url(config.runner.resume):
            reason = refusal(remote, Path(config.runner.run_dir))
            if reason is not None:
                yield f"runner.mirror={url}: {reason}"
    except (RemoteError, FileNotFoundError) as error:
        yield f"runner.mirror={url}: {error}; correct the URL, or this machine's credentials for it"


def _write_and_delete(remote: RemoteFolder) -> None:
    name, data = f".check_{uuid.uuid4().hex}", b"written by the check of runner.mirror\n"
    remote.write(name, data)
    try:
        if (found := remote.read(name)) != data:
            raise RemoteError(f"{name} has {len(found)} bytes there instead of {len(data)}")
    finally:
        remote.delete_file(name)
