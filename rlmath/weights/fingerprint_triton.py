"""The fingerprint of a tensor in one Triton kernel instead of a dozen passes over 64-bit numbers.

Equal to the torch code of ``fingerprint.py`` bit by bit: everything is integer arithmetic, and sums
modulo ``2**64`` do not depend on their order. Imports Triton, so only where it is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program: 32 for each of 128 threads.
BLOCK = 4096
MOST_COLUMNS = 1024


def total(
    bits: Tensor, exponent: int, first_row: int, first_column: int, mix: tuple[int, int]
) -> Tensor:
    """``fingerprint_on_device`` of a tensor's bits.

    Args:
        bits: Integers; rows in dimension 0, and columns in the others.
        exponent: A number without any of these bits counts as 0; 0: every number counts.
        first_row: Number of the first row among the factors; likewise ``first_column``.
        mix: The constants that factors are made with.
    """
    rows = bits.reshape(bits.shape[0], -1) if bits.numel() else bits.new_empty(0, 1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width = min(triton.next_power_of_2(rows.shape[1]), MOST_COLUMNS)
    height = BLOCK // width
    across = triton.cdiv(rows.shape[1], width)
    programs = triton.cdiv(rows.shape[0], height) * across
    sums = torch.empty(programs, dtype=torch.int64, device=bits.device)
    if programs:
        _fingerprint[(programs,)](
            rows,
            rows.stride(0),
            *rows.shape,
            first_row,
            first_column,
            across,
            sums,
            EXPONENT=exponent,
            MIX_1=mix[0],
            MIX_2=mix[1],
            HEIGHT=height,
            WIDTH=width,
        )
    return sums.sum()


@triton.jit
def _odd(places, MIX_1: tl.constexpr, MIX_2: tl.constexpr):  # type: ignore[no-untyped-def]
    mixed = (places + 1) * MIX_1
    mixed = mixed ^ (mixed >> 29)
    mixed = mixed * MIX_2
    mixed = mixed ^ (mixed >> 32)
    return mixed | 1


@triton.jit(do_not_specialize=["height", "width", "first_row", "first_column", "across"])
def _fingerprint(  # type: ignore[no-untyped-def]
    bits,
    stride,
    height,
    width,
    first_row,
    first_column,
    across,
    sums,
    EXPONENT: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per block of rows and columns."""
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = (program % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < height)[:, None] & (column < width)[None, :]
    x = tl.load(bits + row[:, None] * stride + column[None, :], mask=inside, other=0)
    if EXPONENT:
        x = tl.where((x & EXPONENT) == 0, 0, x)
    by_column = _odd(first_column + column, MIX_1, MIX_2)
    of_rows = tl.sum(x.to(tl.int64) * by_column[None, :], 1)
    tl.store(sums + program, tl.sum(of_rows * _odd(first_row + row, MIX_1, MIX_2), 0))
