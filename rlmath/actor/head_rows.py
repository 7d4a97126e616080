"""How many rows the output layer takes at once when logits are never whole.

Imports no torch, so that the planner counts with the same numbers as ``rlmath/actor/head.py``.
"""

from __future__ import annotations

MIB = 2**20
# Logits of a chunk of rows. More rows make the products larger, and the weight's gradient, as large
# as the weight itself, is read and written once for each chunk.
LOGITS_BYTES = 384 * MIB
# One float32 table of the softmax, of which there are a few; it takes a chunk in parts.
TABLE_BYTES = 64 * MIB
# A block of the weight in float32, of its gradient or as the operand of a float32 product.
BLOCK_BYTES = 128 * MIB
# Kernels of matrix products work on tiles of 64 rows or a multiple.
_TILE = 64


def rows_per_chunk(width: int, element_bytes: int) -> int:
    """Rows whose logits are there at once.

    Args:
        width: Of the rank's slice of the vocabulary.
        element_bytes: Of the type of the product.
    """
    return _whole_tiles(LOGITS_BYTES // (width * element_bytes))


def rows_per_table(width: int) -> int:
    """Rows whose softmax is in float32 at once."""
    return max(1, TABLE_BYTES // (4 * width))


def weight_rows_per_block(hidden: int) -> int:
    """Rows of the weight, which are entries of the vocabulary, in one block."""
    return _whole_tiles(BLOCK_BYTES // (4 * hidden))


def _whole_tiles(rows: int) -> int:
    return rows - rows % _TILE if rows >= _TILE else max(1, rows)
