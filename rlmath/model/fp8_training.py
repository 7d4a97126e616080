"""FP8 in the actor (``actor.fp8``): the matrices multiplied in FP8, and their size requirements.

Computed by Transformer Engine. Weights stay in the model's type; each pass multiplies quantized
copies. The rules, checked against the installed version by
``tests/cuda_wheels/test_fp8_contracts.py``:

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

# Numbers that share a scale, along a row of an operand. Tensorwise: alignment of a product.
BLOCKS = {"blockwise": 128, "tensorwise": 16, "mxfp8": 32}
# Alignment of a matrix dimension.
SIZE_MULTIPLES = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32}
# The first GPUs that support a recipe, by CUDA compute capability, and the first that do not.
CAPABILITIES = {
    "blockwise": ((9, 0), None),
    "tensorwise": ((9, 0), None),
    "mxfp8": ((10, 0), (12, 0)),
}
# First CUDA version in which cuBLAS multiplies 128-blocks.
BLOCKWISE_CUDA = (12, 9)


@dataclass(frozen=True)
class Fp8Training:
    format: str  # hybrid (e4m3, and e5m2 for the gradients of activations) or e4m3.
    recipe: str  # Unit of a scale: blockwise, tensorwise or mxfp8.

    @property
    def block(self) -> int:
        """Multiple to which the tokens of each tensor rank are padded."""
        return BLOCKS[self.recipe]

    @property
    def size_multiple(self) -> int:
        """Required alignment of a rank's matrix dimensions, in elements."""
        return SIZE_MULTIPLES[self.recipe]

    def row_multiple(self, layout: Layout) -> int:
        """Multiple to which a micro-batch's tokens on one context rank are padded."""
        return layout.tensor_parallel * self.block


@dataclass(frozen=True)
class RankMatrix:
    name: str  # Megatron's name.
    rows: int  # Output width, before sharding.
    columns: int  # Input width, before sharding.
    row_ranks: int = 1  # Number of ranks that shard the rows.
    column_ranks: int = 1  # Number of ranks that shard the columns.
    count: int = 1  # Number of such matrices in a layer of a rank.

    @property
    def sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width of rows and columns, each with the number of ranks that shard it."""
        return (self.rows, self.row_ranks), (self.columns, self.column_ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape on the rank, rounded down."""
        return self.rows // self.row_ranks, self.columns // self.column_ranks


def rank_matrices(spec: ModelSpec, layout: Layout, moe: bool | None = None) -> list[RankMatrix]:
    """The matrices of a layer that are multiplied in FP8.

    Excluded are the router, the gate of shared experts, and the embedding and output layers, which
    Megatron multiplies itself. ``moe``: matrices of an MoE layer, or of a dense one; ``None``: of
    both, if the model has them.
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
    """A clause for each matrix with unsuitable dimensions, with the arithmetic."""
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
    """Why GPUs of a compute capability cannot use the recipe; ``None`` if they can."""
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
    """Tokens of a micro-batch on a context rank, padded for FP8."""
    if fp8 is None:
        return tokens
    multiple = fp8.row_multiple(layout)
    return math.ceil(tokens / multiple) * multiple
