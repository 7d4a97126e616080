"""A checksum per tensor for shards: the fingerprints of parts add up to that of the whole.

The fingerprint of a tensor is ``sum(bits(x_ij) * r(i) * c(j)) mod 2**64`` over its elements, where
``i`` is the row and ``j`` the index within the row, both in the whole tensor, and ``r`` and ``c``
map them to odd numbers. An odd factor is invertible modulo ``2**64``, so a change of any single
element always changes the fingerprint; swapped values or several changes go unnoticed only by
coincidence. Integer arithmetic wraps identically on CPU and CUDA.

Negative zeros and subnormal numbers count as zero: a CPU's matrix units treat them as zero, so they
are lost when a packed matrix is read back (``rlmath.engines.transports.packed``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlmath.errors import WeightsError

# Elements that a CPU processes at once, at 8 bytes each: as many as fit into a core's cache.
_CHUNK_ELEMENTS = 1 << 17
# Rows and columns use different numbers, or a transposed matrix would look the same.
_ROWS_FROM = 1 << 40
_MIX_1 = -7046029254386353131
_MIX_2 = -4658895280553007687
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bits that are 0 in zeros and subnormal numbers alone.
_EXPONENTS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def fingerprint(part: Tensor, first_row: int = 0, first_column: int = 0) -> int:
    """The contribution of a part of a tensor to the tensor's fingerprint. Returns a signed 64-bit
    number; combine parts with ``add``.

    Args:
        part: The whole tensor, or a rectangle of it: consecutive rows (dimension 0) and columns
            (dimension 1).
        first_row: Index of the part's first row in the tensor.
        first_column: Index of its first column.
    """
    return int(fingerprint_on_device(part, first_row, first_column))


@torch.no_grad()
def fingerprint_on_device(part: Tensor, first_row: int = 0, first_column: int = 0) -> Tensor:
    """:func:`fingerprint` as an int64 scalar on the part's device, without waiting for a GPU."""
    if part.ndim == 0 or part.numel() == 0:
        part = part.reshape(-1)
    first_row, first_column = _ROWS_FROM + first_row, first_column * math.prod(part.shape[2:])
    if part.is_cuda:
        from rlmath.weights import fingerprint_triton

        bits = part.detach().view(_INTEGERS[part.element_size()])
        exponent = _EXPONENTS.get(part.dtype, 0)
        return fingerprint_triton.total(bits, exponent, first_row, first_column, (_MIX_1, _MIX_2))
    columns = math.prod(part.shape[1:])
    by_row = odd_factors(first_row, part.shape[0], part.device)
    by_column = odd_factors(first_column, columns, part.device)
    smallest = torch.finfo(part.dtype).tiny if part.is_floating_point() else 0
    rows_at_once = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for low in range(0, part.shape[0], rows_at_once):
        chunk = part[low : low + rows_at_once]
        if smallest:
            chunk = chunk.masked_fill(chunk.abs() < smallest, 0)
        bits = chunk.contiguous().view(_INTEGERS[part.element_size()]).reshape(len(chunk), -1)
        rows = (bits * by_column).sum(1)
        total += (rows * by_row[low : low + rows_at_once]).sum()
    return total


def odd_factors(first: int, count: int, device: torch.device) -> Tensor:
    """``[count]`` int64: an odd number for each index from ``first`` on. Must not be modified."""
    return (_kept_factors if count <= _KEPT_PLACES else _made_factors)(first, count, device)


def _made_factors(first: int, count: int, device: torch.device) -> Tensor:
    mixed = (torch.arange(first, first + count, dtype=torch.int64, device=device) + 1) * _MIX_1
    mixed ^= mixed >> 29
    mixed *= _MIX_2
    mixed ^= mixed >> 32
    return mixed | 1


# Computing them dominates for small tensors, and a model has few sizes: 16 MiB at most.
_KEPT_PLACES = 1 << 16
_kept_factors = functools.lru_cache(maxsize=32)(_made_factors)


def add(first: int, second: int) -> int:
    """Sum of two fingerprints, wrapped to a signed 64-bit number like tensor arithmetic."""
    return (first + second + 2**63) % 2**64 - 2**63


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Fingerprints of whole tensors, by name."""
    return {name: fingerprint(tensor) for name, tensor in tensors}


def compare_fingerprints(
    sent: Mapping[str, int], held: Mapping[str, int | None], where: str
) -> None:
    """Check that two sides have the same tensors. Raises WeightsError: names up to five tensors
    that differ or are missing on one side.

    Args:
        held: Fingerprints on the other side; ``None``: an unreadable tensor.
        where: Name of the other side, for the message.
    """
    problems = [f"{name} is missing" for name in sent if name not in held]
    problems += [f"{name} was never sent" for name in held if name not in sent]
    problems += [f"{n} differs" for n in sent if held.get(n) not in (None, sent[n])]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(
            f"{where} holds other weights than the trainer sent, {len(problems)} of "
            f"{len(sent)} tensors: {'; '.join(problems[:5])}{more}"
        )
