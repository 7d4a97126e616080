"""Tensors in the header of a safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlmath.weights.pieces import table_name

# The header's length stands in the first bytes, little-endian.
LENGTH_BYTES = 8


@dataclass(frozen=True)
class FileTensor:
    """A tensor's entry in a file's header, and where its bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_in(file: Path) -> dict[str, FileTensor]:
    """The tensors of a whole file, by the tables' names."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    data = LENGTH_BYTES + length
    return {
        table_name(name): FileTensor(
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            *(data + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
        if name[:2] != "__"
    }
