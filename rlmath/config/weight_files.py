"""Whether safetensors files are whole, by their headers alone: quick even for a large model."""

from __future__ import annotations

import json
from pathlib import Path

# The header's length stands in the first bytes, little-endian.
_LENGTH_BYTES = 8


def broken_weight_files(folder: Path) -> list[str]:
    """What is wrong with each safetensors file of a folder that is not whole, one line each."""
    files = sorted(folder.glob("*.safetensors"))
    return [f"{file.name} {problem}" for file in files if (problem := _problem(file))]


def _problem(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if start == b"version ":
            return "is a Git LFS pointer, not the weights; fetch them with git lfs pull"
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or _LENGTH_BYTES + length > size:
            return f"is cut off, or no safetensors file: its header does not fit in {size:,} bytes"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "is no safetensors file: its header cannot be read"
    whole = _LENGTH_BYTES + length + max(ends, default=0)
    if whole == size:
        return None
    return (
        f"is not whole: header {_LENGTH_BYTES + length:,} + tensors {max(ends, default=0):,} = "
        f"{whole:,} bytes, and the file has {size:,}; fetch it again"
    )
