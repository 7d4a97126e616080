"""Brings a run from a remote folder to a local one, so that it can continue there."""

from __future__ import annotations

from pathlib import Path

from rlmath.checkpoint.manifest import MANIFEST
from rlmath.checkpoint.remote import RemoteFolder
from rlmath.checkpoint.remote_owner import keep_id, own_id, owner_of
from rlmath.checkpoint.run_files import download_run_files
from rlmath.checkpoint.store import STEP_NAME, CheckpointStore
from rlmath.checkpoint.transfer import FOLDERS, again, checkpoints_in, download_newest
from rlmath.errors import UserError
from rlmath.monitor.writer import METRICS_FILE
from rlmath.utils.run_lock import only_run_in
from rlmath.utils.sizes import in_words


def split_url(url: str) -> tuple[str, str | None, int | None]:
    """The parts of ``runner.resume``: the run's URL, and folder and step of a checkpoint in it."""
    parts = url.rstrip("/").rsplit("/", 2)
    match = STEP_NAME.fullmatch(parts[-1])
    if match and parts[-2] in FOLDERS:
        return parts[0], parts[-2], int(match[1])
    return url.rstrip("/"), None, None


def describe_remote(url: str, folder: str) -> str:
    """The newest checkpoint that a run could continue from, in words, by its manifest alone. Raises
    UserError: there is none."""
    run_url, _, step = split_url(url)
    remote = RemoteFolder(run_url)
    found = {s: f for s, f in checkpoints_in(remote, folder).items() if MANIFEST in f}
    newest = max((s for s in found if step in (None, s)), default=None)
    if newest is None:
        raise _none(url, folder, "")
    return f"step {newest}, {in_words(sum(found[newest].values()))}"


def fetch_run(url: str, run_dir: Path, folder: str) -> str:
    """Download a run and its newest complete checkpoint.

    A run's folder that has an earlier state of the same run is brought up to date; one that is
    ahead is left as it is.

    Args:
        url: A mirrored run, or one of its checkpoints.
        folder: ``checkpoints`` or ``sft_checkpoints``.

    Returns:
        ``runner.resume`` with which the run continues.

    Raises:
        UserError: There is no complete checkpoint, the folder has another run, or the remote folder
            cannot be read.
    """
    run_url, _, step = split_url(url)
    with only_run_in(run_dir):
        return _fetch(RemoteFolder(run_url), url, run_dir, folder, step)


def _fetch(remote: RemoteFolder, url: str, run_dir: Path, folder: str, step: int | None) -> str:
    owner, own = again(lambda: owner_of(remote)), own_id(run_dir)
    store = CheckpointStore(run_dir / folder, keep=1)
    steps = store.steps()
    is_same = owner is not None and own == owner.run
    if not is_same and (steps or (run_dir / METRICS_FILE).is_file()):
        raise UserError(
            f"runner.resume={url}: runner.run_dir={run_dir} has another run; give an empty folder"
        )
    there = again(lambda: checkpoints_in(remote, folder))
    complete = [s for s, files in there.items() if MANIFEST in files and step in (None, s)]
    if not complete:
        raise _none(url, folder, _list_torn(there))
    if steps and step is None and steps[-1] >= max(complete):
        print(f"resume   {run_dir} is not behind {remote.url}: nothing is downloaded", flush=True)
        return "auto"
    print(f"resume   downloading {remote.url} to {run_dir}", flush=True)
    store.clean_leftovers()
    if owner is not None:
        keep_id(run_dir, owner.run)
    if step is None or not steps:
        download_run_files(remote, run_dir)
    path, skipped = download_newest(remote, folder, store, step)
    for one in skipped:
        print(f"skipped {remote.url}/{one.path}: {one.reason}", flush=True)
    if path is None:
        raise _none(url, folder, "".join(f"\n  - {s.path.name}: {s.reason}" for s in skipped))
    print(f"resume   downloaded {path.name}, complete by its checksums", flush=True)
    return "auto" if step is None or not steps else str(path)


def _list_torn(there: dict[int, dict[str, int]]) -> str:
    names = [f"step_{step:06d}" for step, files in sorted(there.items()) if MANIFEST not in files]
    return "".join(f"\n  - {name}: its upload was not finished" for name in names)


def _none(url: str, folder: str, torn: str) -> UserError:
    found = f":{torn}\n" if torn else ". "
    return UserError(
        f"runner.resume={url} has no complete checkpoint below {folder}/{found}Give the folder of "
        "a run that was mirrored (runner.mirror), or one of its checkpoints."
    )
