"""Files that a reader never sees half written, and JSON that every reader accepts."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlmath.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of ``path`` at the end, or not at all on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp keeps files from all other users.
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def refuse_existing(option: str, paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to replace existing files, before a tool begins. Raises UserError: the file exists."""
    for path in paths:
        if path.is_dir():
            raise UserError(f"{option}: {path} is a folder; give the name of a file")
        if path.exists() and not overwrite:
            raise UserError(
                f"{option}: {path} is there already; give another name, or --overwrite to replace "
                "it"
            )


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; damaged lines are left out."""
    if path.is_file():
        yield from filter(None, map(json_object, path.read_bytes().split(b"\n")))


def json_object(line: bytes) -> dict[str, Any] | None:
    """One line; bytes that are not UTF-8 become the replacement character. ``None``: no object."""
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def to_json(value: Any) -> str:
    """One line of JSON; numbers that JSON has no word for (NaN, ±∞) become ``null``."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """``value`` with ``None`` for every float in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
