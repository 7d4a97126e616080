"""Positions of the files' low-rank adapters in a rank's parameters: pure arithmetic.

A Megatron matrix may contain several matrices of the files (query, key and value; gate and up).
Each adapted one has its own ``A`` and ``B``. Megatron's matrix has one adapter with two parameters:

- ``a``: the ``A`` of the files' matrices, stacked, ``[matrices * rank, in]``;
- ``b``: a row for each row of Megatron's matrix, ``[out, rank]``, from the corresponding ``B``.
  Rows of matrices without an adapter exist, unused and 0.

Tensor ranks shard them like the matrix: if the rows are sharded, so is ``b``, and every rank has
``a``; if the columns are, so is ``a``, and every rank has ``b``. An expert's matrix is sharded over
the expert's tensor ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from rlmath.model.families import Rule
from rlmath.model.lora import Lora, lora_a, lora_b
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.parameters import ADAPTER, LocalParameter, local_parameters, unwrap
from rlmath.weights.pieces import LocalTensor, Piece

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AdapterLayout:
    parts: tuple[str, ...]  # The adapted matrices of the files, in the order of the rows of a.
    # The rank's rows of each of those, as runs of first row and length; empty if only other ranks
    # have any.
    rows: tuple[Runs, ...]
    rule: Rule  # How tensor ranks share the matrix.
    a: LocalTensor  # Layout of a.
    b: LocalTensor  # Layout of b.


def adapter_layout(matrix: LocalParameter, lora: Lora) -> AdapterLayout | None:
    """The adapter of a rank's matrix; ``None`` without one."""
    entry, rank = matrix.entry, lora.rank
    if not entry.per_layer or entry.rule is Rule.replicated:
        return None
    names = (t.name.format(layer=matrix.layer, expert=matrix.expert) for t in entry.hf)
    parts = tuple(name for name in names if lora.adapts(name))
    if not parts:
        return None
    rows, columns = cast(tuple[int, int], matrix.layout.shape)
    if entry.rule is Rule.row:
        ((name,), (piece,)) = parts, matrix.layout.pieces
        runs: tuple[Runs, ...] = (((0, rows),),)
        of_a = [Piece(lora_a(name), 1, piece.hf_start, 0, columns)]
        of_b = [Piece(lora_b(name), 0, 0, 0, rows)]
    else:
        mine = [piece for piece in matrix.layout.pieces if piece.hf_name in parts]
        runs = tuple(
            tuple((one.local_start, one.length) for one in mine if one.hf_name == name)
            for name in parts
        )
        of_a = [Piece(lora_a(n), 0, 0, place * rank, rank) for place, n in enumerate(parts)]
        of_b = [
            Piece(lora_b(one.hf_name), 0, one.hf_start, one.local_start, one.length) for one in mine
        ]
    return AdapterLayout(
        parts,
        runs,
        entry.rule,
        LocalTensor((len(parts) * rank, columns), tuple(of_a)),
        LocalTensor((rows, rank), tuple(of_b), matrix.layout.sections),
    )


def local_adapters(
    model_chunks: Sequence[nn.Module], spec: ModelSpec, parallel: ParallelRank, lora: Lora
) -> list[LocalParameter]:
    """The ``a`` and ``b`` of this rank's model chunks, with the files' tensors in them.

    Args:
        model_chunks: As for ``local_parameters``, with their adapters.
    """
    found = []
    for wrapped in model_chunks:
        chunk = unwrap(wrapped)
        for matrix in local_parameters([chunk], spec, parallel):
            layout = adapter_layout(matrix, lora)
            if layout is None:
                continue
            prefix = matrix.name.removesuffix(".weight") + ADAPTER
            for name, tensor in (("a", layout.a), ("b", layout.b)):
                parameter = chunk.get_parameter(prefix + name)
                found.append(
                    dataclasses.replace(matrix, name=prefix + name, tensor=parameter, layout=tensor)
                )
    return found
