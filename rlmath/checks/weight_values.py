"""Whether a model's weights are numbers: a NaN in one makes every log-prob NaN, and every update.

Without torch. Ranks look at what they load as well, which is how larger models are covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from rlmath.checks.weight_headers import FileTensor
from rlmath.weights.pieces import NOT_FINITE

# About a second from the page cache (2 to 5 GB/s, 2026-11-25).
LIMIT_BYTES = 4 * 2**30
_BLOCK_BYTES = 2**22
# For each type as safetensors name it: an integer of its width, and the bits of the exponent, which
# are all set only in NaN and infinity (IEEE 754).
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def is_small(tensors: Iterable[FileTensor]) -> bool:
    """Whether all values can be read before anything starts."""
    return sum(one.end - one.begin for one in tensors) <= LIMIT_BYTES


def not_finite(tensors: Iterable[tuple[str, FileTensor]]) -> str | None:
    """The first tensor that holds NaN or infinity, in words; ``None``: none does."""
    for name, tensor in tensors:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            if _has_not_finite(stream, tensor):
                return f"{name} in {tensor.file.name} {NOT_FINITE}"
    return None


def _has_not_finite(stream: BinaryIO, tensor: FileTensor) -> bool:
    kind, exponent = _EXPONENTS[tensor.dtype]
    mask = np.array(exponent, kind)[()]
    left = (tensor.end - tensor.begin) // mask.itemsize
    while left > 0:
        block = np.fromfile(stream, kind, min(left, _BLOCK_BYTES // mask.itemsize))
        if not block.size or (block & mask).max() == mask:
            return bool(block.size)
        left -= block.size
    return False
