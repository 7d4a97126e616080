"""Rules for replacing a Hugging Face folder: a model may be replaced, nothing else.

A folder is a *model folder* if it has a ``config.json``. Entries in it that no writer of models
makes (notes, results, other models) are *foreign*, and so is everything in a folder without a
``config.json``. Foreign entries are never deleted unless the user insists.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlmath.checkpoint.manifest import sync
from rlmath.errors import UserError, WeightsError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CONFIG = "config.json"
_MODEL_FILES = (
    _CONFIG,
    "generation_config.json",
    "README.md",
    SINGLE_FILE,
    INDEX_FILE,
    "model-?????-of-?????.safetensors",
    *TOKENIZER_FILES,
)
# In the name of a folder that is being written, after that of its target.
PARTIAL = ".rlmath-partial-"
LFS_POINTER = "is a Git LFS pointer, not the weights; fetch them with git lfs pull"
# renameat2(2) swaps two names in one step. Not in Python's standard library.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Foreign(UserError):
    """Replacing a folder would delete something foreign."""


def listed_files(folder: Path) -> dict[str, str]:
    """The file of each tensor in the index; without an index only ``model.safetensors``, under an
    empty name.

    Raises:
        WeightsError: There are no safetensors; the index is invalid; or the index lists files other
            than an existing ``model.safetensors``, so that transformers and vLLM would read
            different ones.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if single.is_file():
            return {"": SINGLE_FILE}
        raise WeightsError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with "
            "transformers' save_pretrained, which writes safetensors"
        )
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(listed.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{index} cannot be read ({type(error).__name__}: {error}): it has to be a JSON object "
            "with weight_map, the file of each tensor; fetch it again"
        ) from None
    if single.is_file() and files != {SINGLE_FILE}:
        raise WeightsError(
            f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}, which lists {len(files)} other "
            "files: transformers reads the first, vLLM those of the index; remove one of the two"
        )
    return dict(listed)


def open_tensors(path: Path) -> Any:
    """Open a safetensors file. Raises OSError; and WeightsError: it is damaged, or a pointer."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        with path.open("rb") as stream:
            if is_lfs_pointer(stream.read(8)):
                raise WeightsError(f"{path} {LFS_POINTER}") from None
        raise WeightsError(
            f"{path} is cut off or no safetensors file ({error}); fetch or save it again"
        ) from None


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file starts like a Git LFS pointer, which replaces a large file."""
    return start.startswith(b"version ")


def foreign_entries(folder: Path) -> list[str]:
    """Names in an existing folder that no writer of models made; all of them without a
    ``config.json``."""
    names = sorted(os.listdir(folder))
    if _CONFIG not in names:
        return names
    return [
        name
        for name in names
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _MODEL_FILES)
        or not (folder / name).is_file()
    ]


def check_target(folder: str | Path, *, sources: tuple[Path, ...] = ()) -> None:
    """Refuse to write a model where something else would be lost. Raises UserError: the target is a
    file, or is or contains a source; Foreign: it has foreign entries; the message names up to five.

    Args:
        folder: Target of the model. It may be missing, empty, or a model folder without foreign
            entries.
        sources: Folders that are read while writing, which the target must not replace.
    """
    folder = Path(folder)
    if (source := replaced_source(folder, sources)) is not None:
        raise UserError(
            f"{folder} is, or contains, {source}, which is read to write it; choose another folder"
        )
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder; choose another folder to write to")
    foreign = foreign_entries(folder)
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        what = (
            "holds more than a model" if (folder / _CONFIG).is_file() else "is not a model folder"
        )
        raise Foreign(
            f"{folder} {what}: replacing it would delete {', '.join(foreign[:5])}{more}. Choose "
            "another folder, move these files, or pass --overwrite to replace the whole folder"
        )


def replaced_source(folder: Path, sources: Iterable[Path]) -> Path | None:
    """The first source that is the folder or is inside it, and would be replaced."""
    target = folder.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            return source
    return None


@contextlib.contextmanager
def replacing_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder to write into. It takes the place of ``folder`` when the block ends, as in
    :func:`put_in_place`, and is removed after an error."""
    partial = _new_partial(folder)
    try:
        yield partial
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        put_in_place(partial, folder, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _new_partial(folder: Path) -> Path:
    """A new empty folder next to ``folder`` to write into; leftovers of this host's dead processes
    for the same folder are removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}{PARTIAL}"
    own = f"{prefix}{socket.gethostname()}-"
    for name in os.listdir(folder.parent):
        if name.startswith(own):
            pid = name.removeprefix(own).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(folder.parent / name, ignore_errors=True)
    partial = folder.parent / f"{own}{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir()
    return partial


def put_in_place(partial: Path, folder: Path, *, overwrite: bool) -> None:
    """Move a complete folder into place; readers see the old or the new one, never a mixture.

    Args:
        partial: Folder on the same file system.
        folder: Target. Foreign entries of an older folder there are moved into the new one.
        overwrite: Delete them instead.
    """
    if folder.is_symlink():
        # Keep the user's link and replace its target.
        folder = folder.resolve()
    if not folder.exists():
        partial.rename(folder)
        sync(folder.parent)
        return
    foreign = [] if overwrite else foreign_entries(folder)
    old = partial
    if foreign:
        # No later process removes a folder of this name.
        old = partial.rename(partial.with_name(partial.name.replace("-partial-", "-replaced-")))
    try:
        _exchange(old, folder)
        sync(folder.parent)
        for name in foreign:
            if not (folder / name).exists():
                (old / name).rename(folder / name)
    except BaseException as error:
        if all(os.path.lexists(folder / name) for name in foreign):
            shutil.rmtree(old, ignore_errors=True)
        else:
            error.add_note(f"Files that were in {folder} besides the model may be in {old}")
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names, in one step if kernel and file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        names = os.fsencode(one), os.fsencode(other)
        if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name(one.name + "-old")
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)
