"""A file of named arrays with a header of JSON, compressed, with a checksum; read without torch.

    MAGIC | header's length, CRC-32 of the header, CRC-32 of what follows | header | arrays

An array's bytes are laid out plane by plane (all lowest bytes, then all second bytes, ...): token
ids and the exponents of floats then compress, and a plane that does not is stored as it is.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"rlmath1\n"
_FRAME = struct.Struct("<III")
_COMPRESSION = 1
# Of a plane, from its middle: whether it compresses at all.
_PROBE_BYTES = 1 << 15
_WORTH_IT = 0.9


class BrokenFile(ValueError):
    """A file is not what was written. The message says how."""


def write_arrays(
    file: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write a file.

    Args:
        header: Of what JSON has.
        arrays: Booleans are stored as bits.
    """
    pieces: list[bytes] = []
    described = []
    for name, array in arrays.items():
        own = [_compressed(plane) for plane in _planes(array)]
        pieces += own
        described.append([name, array.dtype.str, list(array.shape), [len(one) for one in own]])
    head = json.dumps({**header, "arrays": described}, separators=(",", ":")).encode("ascii")
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    file.write(MAGIC + _FRAME.pack(len(head), zlib.crc32(head), checksum) + head)
    file.writelines(pieces)


def read_header(path: Path) -> dict[str, Any]:
    """The header alone.

    Raises:
        BrokenFile: It is damaged, or of another version.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return _header(file, path)[0]


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays.

    Raises:
        BrokenFile: A bit of it is not what was written.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        header, wanted = _header(file, path)
        rest = file.read()
    if zlib.crc32(rest) != wanted:
        raise BrokenFile(f"{path}: its checksum differs")
    arrays, start = {}, 0
    for name, dtype, shape, sizes in header.pop("arrays"):
        planes = []
        for size in sizes:
            planes.append(_plain(rest[start : start + size]))
            start += size
        arrays[name] = _joined(planes, np.dtype(dtype), shape)
    return header, arrays


def _header(file: IO[bytes], path: Path) -> tuple[dict[str, Any], int]:
    if file.read(len(MAGIC)) != MAGIC:
        raise BrokenFile(f"{path}: not a file of this version of rlmath")
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        raise BrokenFile(f"{path}: cut off")
    length, checksum, of_rest = _FRAME.unpack(frame)
    head = file.read(length)
    if len(head) < length or zlib.crc32(head) != checksum:
        raise BrokenFile(f"{path}: its header is damaged")
    header: dict[str, Any] = json.loads(head)
    return header, of_rest


def _planes(array: NDArray[Any]) -> Iterator[bytes]:
    if array.dtype == np.bool_:
        yield np.packbits(array.reshape(-1)).tobytes()
        return
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    by_byte = little.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)
    for place in range(array.dtype.itemsize):
        yield by_byte[:, place].tobytes()


def _joined(planes: list[bytes], dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    count = math.prod(shape)
    if dtype == np.bool_:
        bits = np.unpackbits(np.frombuffer(planes[0], np.uint8), count=count)
        return bits.astype(np.bool_).reshape(shape)
    by_byte: NDArray[np.uint8] = np.empty((count, dtype.itemsize), np.uint8)
    for place, plane in enumerate(planes):
        by_byte[:, place] = np.frombuffer(plane, np.uint8)
    little = by_byte.reshape(-1).view(dtype.newbyteorder("<"))
    return little.astype(dtype.newbyteorder("=")).reshape(shape)


def _compressed(plane: bytes) -> bytes:
    """A mark, then the bytes: ``z`` compressed, or ``r`` as they are."""
    middle = max(0, (len(plane) - _PROBE_BYTES) // 2)
    probe = plane[middle : middle + _PROBE_BYTES]
    if len(zlib.compress(probe, _COMPRESSION)) > _WORTH_IT * len(probe):
        return b"r" + plane
    return b"z" + zlib.compress(plane, _COMPRESSION)


def _plain(piece: bytes) -> bytes:
    return piece[1:] if piece[:1] == b"r" else zlib.decompress(piece[1:])
