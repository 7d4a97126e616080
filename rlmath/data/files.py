"""Rows of data files, each with the place where it stands."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config.hub_names import is_hub
from rlmath.data.hub import hub_rows
from rlmath.errors import UserError


class MalformedRowError(ValueError):
    """One row that cannot be used; the message says why and what would help."""


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    Attributes:
        place: File and row, such as ``train.jsonl:17``: the line of a jsonl file, the row of
            others, from 1. Different for each row of one list of files.
        fields: The row, or what is wrong with it.
    """

    place: str
    fields: dict[str, Any] | MalformedRowError


def read_rows(paths: Sequence[str | Path]) -> Iterator[Row]:
    """All rows of all files, in order. Empty lines of a jsonl file are no rows.

    Args:
        paths: ``.jsonl`` (an object per line), ``.json`` (a list of objects, or an object with
            one list of objects in it), ``.parquet``, or a data set of the hub, see
            :func:`rlmath.data.hub.hub_rows`.

    Raises:
        UserError: A file is missing, given twice, of another kind, or broken as a whole.
    """
    files = [Path(path) for path in paths if not is_hub(path)]
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: {_no_file(path)}")
        if path.suffix not in _READERS:
            raise UserError(f"{path}: data files end in {', '.join(_READERS)}")
    names = dict(zip(files, _distinct_names(files), strict=True))
    for given in paths:
        if is_hub(given):
            name, rows = str(given), hub_rows(str(given))
        else:
            path = Path(given)
            name, rows = names[path], _READERS[path.suffix](path)
        for number, fields in rows:
            if not isinstance(fields, dict | MalformedRowError):
                kind = type(fields).__name__
                fields = MalformedRowError(f"a row is an object with fields, this is a {kind}")
            yield Row(f"{name}:{number}", fields)


def _no_file(path: Path) -> str:
    """Why a path is no file, with the one that was probably meant."""
    if path.is_dir():
        return "is a folder; give the files in it"
    if not path.parent.is_dir():
        return f"there is no such file, nor the folder {path.parent}"
    close = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1)
    return "there is no such file" + (f"; did you mean {path.parent / close[0]}?" if close else "")


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                # Its own text has a line number, which is that of the row within itself.
                what = f"{error.msg} at character {error.pos + 1} of the line"
                yield number, MalformedRowError(f"not a JSON object: {what}")
            except ValueError as error:  # Broken UTF-8.
                yield number, MalformedRowError(f"not a JSON object: {error}")


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path}: not JSON: {error}; a file of one object per line is .jsonl"
        ) from (error)
    if isinstance(content, dict):
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        if len(lists) != 1:
            raise UserError(
                f"{path}: an object with {len(lists)} lists in it ({', '.join(lists) or 'none'}); "
                "it must be a list of rows, or an object with one list of rows"
            )
        content = next(iter(lists.values()))
    if not isinstance(content, list):
        raise UserError(f"{path}: a list of rows is wanted, this is a {type(content).__name__}")
    yield from enumerate(content, start=1)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    number += 1
                    yield number, fields
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a parquet file that can be read: {error}") from error


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


def _distinct_names(files: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells the files apart, so that places are distinct."""
    parts = [path.resolve().parts for path in files]
    if len(set(parts)) < len(parts):
        twice = next(path for path, own in zip(files, parts, strict=True) if parts.count(own) > 1)
        raise UserError(f"{twice}: the same file is given twice; give it once")
    length = 1
    while len({own[-length:] for own in parts}) < len(parts):
        length += 1
    return ["/".join(own[-length:]) for own in parts]
