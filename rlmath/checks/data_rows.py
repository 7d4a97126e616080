"""The first rows of a data file, read in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlmath.errors import ConfigError

# Rows that are looked at in each data file; the whole file is read when the run starts.
PEEKED_ROWS = 4


def peek_rows(path: str | Path) -> list[tuple[str, Any]]:
    """The first rows of a data file, each with where it stands (``file.jsonl:3``).

    Args:
        path: A ``.jsonl``, ``.json`` or ``.parquet`` file.

    Raises:
        ConfigError: The file is missing, empty, of another kind, or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        kind = "it is a folder; give the files in it" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {kind}")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: data files end in {', '.join(readers)}")
    try:
        rows = readers[path.suffix](path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows in it")
    return rows


def _jsonl_rows(path: Path) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:
                rows.append((f"{path}:{number}", error))
            if len(rows) == PEEKED_ROWS:
                break
    return rows


def _json_rows(path: Path) -> list[tuple[str, Any]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):  # An object with the list of rows in it.
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else data
    if not isinstance(data, list):
        raise ValueError("a .json data file is a list of rows, or an object with one list in it")
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(data[:PEEKED_ROWS])]


def _parquet_rows(path: Path) -> list[tuple[str, Any]]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        batch = next(file.iter_batches(batch_size=PEEKED_ROWS), None)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(str(error)) from error
    rows = [] if batch is None else batch.to_pylist()
    return [(f"{path}, row {i + 1}", row) for i, row in enumerate(rows)]
