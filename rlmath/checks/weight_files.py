"""Whether safetensors files are whole and of the model that config.json describes.

By their headers alone: quick even for a large model.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlmath.errors import UserError
from rlmath.model.spec import read_model_spec
from rlmath.weights.pieces import first_of, misfits

# The header's length stands in the first bytes, little-endian.
_LENGTH_BYTES = 8
# Of a tensor, as safetensors name them.
TYPES = ("F64", "F32", "F16", "BF16")


def broken_weight_files(folder: Path) -> list[str]:
    """What is wrong with each safetensors file of a folder that is not whole, one line each."""
    files = sorted(folder.glob("*.safetensors"))
    return [f"{file.name} {problem}" for file in files if (problem := _problem(file))]


def broken_json_files(folder: Path) -> list[str]:
    """What is wrong with each of a model's JSON files that cannot be read, one line each."""
    problems = []
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            problems.append(f"{name} cannot be read: {error}")
    return problems


def weights_misfit(folder: Path) -> str | None:
    """How tensors in whole files differ from what config.json says, or what is wrong with that."""
    try:
        spec = read_model_spec(folder)
    except UserError as error:
        return str(error)
    if not all(file.is_file() for file in _model_files(folder)):
        return "there is neither model.safetensors nor model.safetensors.index.json with its files"
    found: dict[str, tuple[int, ...]] = {}
    other: list[str] = []
    for file in _model_files(folder):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name[:2] != "__"}
        found |= {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        # Whole numbers would be taken for weights, without a word.
        other += [
            f"{n} has type {e['dtype']}" for n, e in tensors.items() if e["dtype"] not in TYPES
        ]
    if other:
        return f"weights have to be of type {', '.join(TYPES)}, and {first_of(sorted(other))}"
    problems = misfits(spec, found)
    return f"the weights are not those of config.json: {first_of(problems)}" if problems else None


def _model_files(folder: Path) -> list[Path]:
    """Those that are read; other safetensors may lie beside them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(where.values()))]
    return [folder / "model.safetensors"]


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
