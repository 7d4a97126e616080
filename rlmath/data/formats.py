"""Readers of data files and folders: numbered rows of each format."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlmath.errors import UserError

Rows = Iterator[tuple[int, Any]]

COMPRESSED = (".gz", ".zst", ".bz2")
# Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
_SAVED, _SPLITS = "state.json", "dataset_dict.json"


class MalformedRowError(ValueError):
    """A row that cannot be used; the message gives the reason and the fix."""


def reader_of(path: Path) -> Callable[[Path], Rows]:
    """The reader for a file or a folder. Raises UserError: it is a folder or a format that cannot
    be read; the message has a command that converts it."""
    if path.is_dir():
        return _reader_of_folder(path)
    names = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    kind = Path(names).suffix
    if kind in _OF_TEXT or (kind in _READERS and path.suffix not in COMPRESSED):
        return (_OF_TEXT | _READERS)[kind]
    known = ", ".join(_OF_TEXT | _READERS)
    raise UserError(
        f"{path}: data files end in {known} (text also with {', '.join(COMPRESSED)}), or are a "
        f"folder of datasets' save_to_disk; convert it: {_conversion(path)}"
    )


def is_data_file(path: Path) -> bool:
    return path.is_file() and path.suffix in {".parquet", ".jsonl", ".csv", ".arrow"}


def _reader_of_folder(path: Path) -> Callable[[Path], Rows]:
    if (path / _SAVED).is_file():
        return _read_saved
    if (path / _SPLITS).is_file():
        splits = json.loads((path / _SPLITS).read_bytes()).get("splits", [])
        which = " or ".join(str(path / split) for split in splits)
        raise UserError(f"{path}: a saved data set with several splits; give {which}")
    found = sorted(file for file in path.rglob("*") if is_data_file(file))
    if found:
        listed = ",".join(map(str, found[:4])) + (",..." if len(found) > 4 else "")
        raise UserError(f"{path}: is a folder; give the files in it: [{listed}]")
    if next(path.rglob("*.json"), None) is None:
        raise UserError(f"{path}: is a folder without data; give files")
    return _file_per_problem


def _conversion(path: Path) -> str:
    readers = {".xlsx": "excel", ".xls": "excel", ".tsv": "table", ".feather": "feather"}
    read = f"read_{readers[path.suffix]}" if path.suffix in readers else "read_json"
    target = path.with_suffix(".jsonl").name
    return (
        f"python -c \"import pandas; pandas.{read}('{path}').to_json('{target}', "
        "orient='records', lines=True)\""
    )


def _open(path: Path) -> BinaryIO:
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="detect"))


def _jsonl(path: Path) -> Rows:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                # The library counts lines within the row's text.
                what = f"{error.msg} at character {error.pos + 1} of the line"
                yield number, MalformedRowError(f"not a JSON object: {what}")
            except ValueError as error:  # Broken UTF-8.
                yield number, MalformedRowError(f"not a JSON object: {error}")


def _json(path: Path) -> Rows:
    with _open(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{path}: not JSON: {error}; a file of one object per line is .jsonl"
        ) from error
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


def _csv(path: Path) -> Rows:
    """Rows below a header of names; every field is a string."""
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(2**31 - 1)
        try:
            for number, row in enumerate(csv.DictReader(text, strict=True), start=1):
                if None in row or None in row.values():
                    yield number, MalformedRowError("another number of fields than the first line")
                else:
                    yield number, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a CSV file in UTF-8: {error}") from error


def _parquet(path: Path) -> Rows:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _number_rows(file.iter_batches(batch_size=4096))


def _arrow(path: Path) -> Rows:
    """Rows of the datasets library's cache (a stream), or of Feather (a file)."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            batches = iter(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        yield from _number_rows(batches)


def _number_rows(batches: Iterable[Any]) -> Rows:
    return enumerate((fields for batch in batches for fields in batch.to_pylist()), start=1)


def _read_saved(folder: Path) -> Rows:
    files = json.loads((folder / _SAVED).read_bytes())["_data_files"]
    rows = (fields for file in files for _, fields in _arrow(folder / file["filename"]))
    yield from enumerate(rows, start=1)


def _file_per_problem(folder: Path) -> Rows:
    """MATH as published: each file of the folder and its subfolders is a row."""
    for number, file in enumerate(sorted(folder.rglob("*.json")), start=1):
        try:
            content = json.loads(file.read_bytes())
        except ValueError as error:
            yield number, MalformedRowError(f"{file.relative_to(folder)}: not JSON: {error}")
            continue
        if isinstance(content, list):
            raise UserError(f"{folder}: is a folder, and {file} has many rows; give the files")
        yield number, content


_OF_TEXT = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
_READERS = {".parquet": _parquet, ".arrow": _arrow}
