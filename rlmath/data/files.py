"""Rows of data files, each with its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.hub_names import is_hub, parts_of
from rlmath.data.formats import MalformedRowError as MalformedRowError
from rlmath.data.formats import reader_of
from rlmath.errors import UserError


@dataclass(frozen=True)
class Row:
    # File and row, such as train.jsonl:17, from 1: the line of a jsonl file, the row of others, the
    # file of a folder. Unique within one list of files.
    place: str
    fields: dict[str, Any] | MalformedRowError  # The row, or the error that makes it unusable.


def read_rows(paths: Sequence[str | Path]) -> Iterator[Row]:
    """All rows of all files, in order, without empty lines of jsonl files. Raises UserError: a file
    is missing, given twice, of another kind, or broken as a whole.

    Args:
        paths: ``.jsonl`` (an object per line), ``.json`` (a list of objects, or an object with
            one list of objects in it), ``.csv``, each also compressed; ``.parquet``, ``.arrow``;
            a folder of ``save_to_disk`` or of one JSON file per problem; or a data set of the
            hub, see :func:`hub_rows`.
    """
    files = [Path(path) for path in paths if not is_hub(path)]
    for path in files:
        if not path.exists():
            raise UserError(f"{path}: {_no_file(path)}")
    readers = {path: reader_of(path) for path in files}
    names = dict(zip(files, _distinct_names(files), strict=True))
    for given in paths:
        if is_hub(given):
            name, rows = str(given), hub_rows(str(given))
        else:
            path = Path(given)
            name, rows = names[path], _readable(path, readers[path](path))
        for number, fields in rows:
            if not isinstance(fields, dict | MalformedRowError):
                kind = type(fields).__name__
                fields = MalformedRowError(f"a row is an object with fields, this is a {kind}")
            yield Row(f"{name}:{number}", fields)


def _readable(path: Path, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Turn errors of the libraries (Arrow's are OSError and ValueError) into one message."""
    try:
        yield from rows
    except (OSError, ValueError, EOFError, NotImplementedError) as error:
        kind = "".join(path.suffixes[-2:]) or "data"
        raise UserError(f"{path}: not a {kind} file that can be read: {error}") from error


def _no_file(path: Path) -> str:
    """A message that a path does not exist, with the one that was probably meant."""
    if not path.parent.is_dir():
        return f"there is no such file, nor the folder {path.parent}"
    close = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1)
    return "there is no such file" + (f"; did you mean {path.parent / close[0]}?" if close else "")


def _distinct_names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of equal length, that tell the files apart."""
    parts = [path.resolve().parts for path in files]
    if len(set(parts)) < len(parts):
        twice = next(path for path, own in zip(files, parts, strict=True) if parts.count(own) > 1)
        raise UserError(f"{twice}: the same file is given twice; give it once")
    length = 1
    while len({own[-length:] for own in parts}) < len(parts):
        length += 1
    return ["/".join(own[-length:]) for own in parts]


def hub_rows(path: str) -> Iterator[tuple[int, Any]]:
    """The rows of a data set, numbered from 1. Raises UserError: it cannot be fetched, or is not
    named so."""
    name, config, split = parts_of(path)
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path}: the data set cannot be read ({reason}); it needs a network or a cached copy, "
            "or fetch it with toolkits/prepare_data.py on a machine that has one"
        ) from error
    yield from enumerate(rows, start=1)
