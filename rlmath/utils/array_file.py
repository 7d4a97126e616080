"""A file of named arrays with a JSON header: a zip of ``.npy`` files, like ``numpy.savez``, with
checksums verified on reading. Without torch."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_HEADER = "header.json"
_ARRAY = ".npy"
_COMPRESSION = 1


class BrokenFile(ValueError):
    """A file is damaged. The message says how."""


def write_arrays(
    file: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write a file. ``header``: JSON values. ``arrays``: floats, which hardly compress, are stored
    uncompressed; all others compressed."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        archive.writestr(_HEADER, json.dumps({**header, "arrays": list(arrays)}))
        for name, array in arrays.items():
            plain = io.BytesIO()
            np.save(plain, array, allow_pickle=False)
            kind = zipfile.ZIP_STORED if array.dtype.kind == "f" else zipfile.ZIP_DEFLATED
            archive.writestr(f"{name}{_ARRAY}", plain.getbuffer(), kind, _COMPRESSION)


def read_header(path: Path) -> dict[str, Any]:
    """Read only the header. Raises BrokenFile: the header is damaged; OSError: the file cannot be
    read."""
    return _read(path, arrays=False)[0]


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays, in this machine's byte order. Raises BrokenFile: the file is damaged;
    OSError: the file cannot be read."""
    return _read(path, arrays=True)


def _read(path: Path, *, arrays: bool) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            header: dict[str, Any] = json.loads(archive.read(_HEADER))
            names, found = header.pop("arrays"), {}
            for name in names if arrays else ():
                one = np.load(io.BytesIO(archive.read(f"{name}{_ARRAY}")), allow_pickle=False)
                found[name] = one.astype(one.dtype.newbyteorder("="), copy=False)
        except Exception as error:  # From zipfile, zlib, json and NumPy on damaged bytes.
            raise BrokenFile(f"{path}: damaged: {type(error).__name__}: {error}") from error
    return header, found
