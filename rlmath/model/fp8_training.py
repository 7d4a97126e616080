"""FP8 in the actor (``actor.fp8``): which matrices multiply in it, and which sizes it takes.

Transformer Engine computes it. Weights stay in the model's type; each pass multiplies copies of
them. Its rules, held to the installed version by ``tests/cuda_wheels/test_fp8_contracts.py``:

- both sides of a matrix are multiples of :attr:`Fp8Training.size_multiple` on each rank
  (``assert_dim_for_fp8_exec``, and for MXFP8 ``MXFP8Quantizer.make_empty``);
- tokens that tensor ranks all-gather in FP8 are multiples of :attr:`Fp8Training.block` on each
  rank, and so is the hidden width (``assert_dim_for_all_gather``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

# Numbers that share a scale, along a row of what is multiplied. Per tensor: what a product takes.
BLOCKS = {"blockwise": 128, "tensorwise": 16, "mxfp8": 32}
# Of a side of a matrix.
SIZE_MULTIPLES = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32}
# The first GPUs that have a recipe, by CUDA's compute capability, and the first that have not.
CAPABILITIES = {
    "blockwise": ((9, 0), None),
    "tensorwise": ((9, 0), None),
    "mxfp8": ((10, 0), (12, 0)),
}
# CUDA from which cuBLAS multiplies 128-blocks.
BLOCKWISE_CUDA = (12, 9)


@dataclass(frozen=True)
class Fp8Training:
    """How the actor computes in FP8.

    Attributes:
        format: ``hybrid`` (e4m3, and e5m2 for the gradients of activations) or ``e4m3``.
        recipe: What shares a scale: ``blockwise``, ``tensorwise`` or ``mxfp8``.
    """

    format: str
    recipe: str

    @property
    def block(self) -> int:
        """Tokens of each tensor rank are padded to a multiple of it."""
        return BLOCKS[self.recipe]

    @property
    def size_multiple(self) -> int:
        """Of which the sides of each rank's matrices are multiples."""
        return SIZE_MULTIPLES[self.recipe]

    def row_multiple(self, layout: Layout) -> int:
        """Of which the tokens of a micro-batch on one context rank are a multiple."""
        return layout.tensor_parallel * self.block


@dataclass(frozen=True)
class RankMatrix:
    """A matrix of a layer as one rank has it.

    Attributes:
        name: Megatron's, and for experts those of each.
        rows: Width of what it gives, before it is split.
        columns: Width of what it takes, before it is split.
        row_ranks: Ranks that split the rows.
        column_ranks: Ranks that split the columns.
        count: How many a layer of a rank has.
    """

    name: str
    rows: int
    columns: int
    row_ranks: int = 1
    column_ranks: int = 1
    count: int = 1

    @property
    def sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of rows and of columns: the width and the ranks that split it."""
        return (self.rows, self.row_ranks), (self.columns, self.column_ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """On the rank, in whole numbers."""
        return self.rows // self.row_ranks, self.columns // self.column_ranks


def rank_matrices(spec: ModelSpec, layout: Layout, moe: bool | None = None) -> list[RankMatrix]:
    """The matrices of a layer that multiply in FP8.

    Not among them: the router, the gate of shared experts, embedding and output layer, which
    Megatron multiplies itself.

    Args:
        moe: Of an MoE layer, or of a dense one; ``None``: of both, as far as the model has them.
    """
    tp, etp = layout.tensor_parallel, layout.expert_tensor_parallel
    hidden, query = spec.hidden, spec.heads * spec.head_dim
    found = [
        RankMatrix("linear_qkv", query + 2 * spec.kv_heads * spec.head_dim, hidden, row_ranks=tp),
        RankMatrix("linear_proj", hidden, query, column_ranks=tp),
    ]

    def feed_forward(name: str, width: int, ranks: int, count: int = 1) -> list[RankMatrix]:
        return [
            RankMatrix(f"{name}linear_fc1", 2 * width, hidden, row_ranks=ranks, count=count),
            RankMatrix(f"{name}linear_fc2", hidden, width, column_ranks=ranks, count=count),
        ]

    if moe is not True and spec.moe_layers < spec.layers:
        found += feed_forward("mlp.", spec.ffn, tp)
    if moe is not False and spec.moe_layers:
        own = spec.experts // layout.expert_parallel
        found += feed_forward("experts.", spec.moe_ffn, etp, own)
        if spec.shared_ffn:
            found += feed_forward("shared_experts.", spec.shared_ffn, tp)
    return found


def size_problems(spec: ModelSpec, layout: Layout, fp8: Fp8Training) -> Iterator[str]:
    """A clause for each matrix that does not divide, with the arithmetic."""
    multiple = fp8.size_multiple
    for one in rank_matrices(spec, layout):
        for side, (width, ranks) in zip(("rows", "columns"), one.sides, strict=True):
            if width % (ranks * multiple):
                share = f" / {ranks} ranks = {width / ranks:g}" if ranks > 1 else ""
                yield f"{one.name} has {width}{share} {side}, which {multiple} does not divide"
    if layout.tensor_parallel > 1 and spec.hidden % fp8.block:
        yield (
            f"the hidden width is {spec.hidden}, which {fp8.block} does not divide, as tokens that "
            f"{layout.tensor_parallel} tensor ranks all-gather in FP8 need"
        )


def capability_problem(fp8: Fp8Training, capability: tuple[int, int]) -> str | None:
    """Why GPUs of a compute capability have no such products; ``None``: they have."""
    first, beyond = CAPABILITIES[fp8.recipe]
    if capability >= first and (beyond is None or capability < beyond):
        return None
    found = ".".join(map(str, capability))
    if capability < (9, 0):
        return (
            f"actor.fp8={fp8.format}: FP8 products need a Hopper GPU or a newer one (compute "
            f"capability 9.0), and this one has {found}; use actor.fp8=none"
        )
    return (
        f"actor.fp8_recipe={fp8.recipe}: Transformer Engine has it for compute capability 10 "
        f"(B200 and its like), and this one has {found}; use blockwise"
    )


def padded_tokens(tokens: int, fp8: Fp8Training | None, layout: Layout) -> int:
    """Tokens of a micro-batch on a context rank with the padding that FP8 needs."""
    if fp8 is None:
        return tokens
    multiple = fp8.row_multiple(layout)
    return math.ceil(tokens / multiple) * multiple
