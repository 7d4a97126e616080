"""Number of rows that the output layer processes at once with chunked logits.

Does not import torch, so the planner can use the same numbers as ``rlmath/actor/head.py``.
"""

from __future__ import annotations

MIB = 2**20
# Size of a chunk's logits. More rows make the products larger, and the weight's gradient, as large
# as the weight, is read and written once per chunk.
LOGITS_BYTES = 384 * MIB
# Size of one float32 table of the softmax, of which there are a few; a chunk is processed in parts.
TABLE_BYTES = 64 * MIB
# Size of a block of the weight in float32, for its gradient or as an operand of a float32 product.
BLOCK_BYTES = 128 * MIB
# Kernels of matrix products use tiles of 64 rows or a multiple.
_TILE = 64


def rows_per_chunk(width: int, element_bytes: int) -> int:
    """Rows whose logits exist at the same time. ``width``: size of the rank's slice of the
    vocabulary. ``element_bytes``: size of an element of the product."""
    return _whole_tiles(LOGITS_BYTES // (width * element_bytes))


def rows_per_table(width: int) -> int:
    """Rows whose softmax is in float32 at the same time."""
    return max(1, TABLE_BYTES // (4 * width))


def weight_rows_per_block(hidden: int) -> int:
    """Rows of the weight (entries of the vocabulary) in one block."""
    return _whole_tiles(BLOCK_BYTES // (4 * hidden))


def _whole_tiles(rows: int) -> int:
    return rows - rows % _TILE if rows >= _TILE else max(1, rows)
