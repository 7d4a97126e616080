"""Plan which bytes are sent from which trainer rank to which engine rank.

A pure function of the model spec and the two layouts. Weights are gathered in buckets of whole
Hugging Face tensors: a *gather* takes a run of a tensor from the trainer rank that has it, a *load*
is the part that an engine rank keeps. ``rlmath.weights.gather`` sends exactly these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlmath.config.weights import BUCKET_MIB
from rlmath.errors import WeightsError
from rlmath.model.families import Entry, Rule, When
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, padded_vocab_size
from rlmath.utils.lazy_torch import torch
from rlmath.weights.buckets import Bucket, TensorMeta, cut_into_buckets
from rlmath.weights.pieces import hf_shapes, local_tensor, share, walk

# vLLM pads the vocabulary to a multiple of this before sharding it.
ENGINE_VOCAB_MULTIPLE = 64
# Rows of matrices that engine ranks shard by query heads.
_OF_HEADS = ("query", "content_and_value")


@dataclass(frozen=True)
class SourceRank:
    """A trainer rank: pipeline stage, tensor rank (within experts for an expert), expert rank."""

    pp: int
    tp: int
    ep: int


@dataclass(frozen=True)
class Operation:
    """A run of a tensor that one rank sends or keeps."""

    tensor: str  # Hugging Face name.
    # The trainer rank that sends it, or the engine's tensor rank that keeps it.
    rank: SourceRank | int
    dim: int  # Dimension of the run: 0 rows, 1 columns.
    start: int  # First row or column.
    length: int  # Number of rows or columns.
    num_bytes: int  # Size of the run.


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket with its operations, in the order of its tensors."""

    bucket: Bucket
    gathers: tuple[Operation, ...]
    loads: tuple[Operation, ...]


@dataclass(frozen=True)
class WeightsPlan:
    """Plan of one engine's weight sync.

    Attributes:
        spec, actor, engine: The request.
        dtype: Type of the tensors sent.
        stages: Global layers of each chunk of each pipeline stage.
        padded_vocab: Rows of the embedding in the trainer.
        buckets: Buckets in the order of sending.
    """

    spec: ModelSpec
    actor: Layout
    engine: Layout
    dtype: torch.dtype
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    padded_vocab: int
    buckets: tuple[PlannedBucket, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the model."""
        return sum(t.meta.num_bytes for b in self.buckets for t in b.bucket.tensors)

    @property
    def largest_bucket_bytes(self) -> int:
        """Size of the largest bucket. A receiving rank has two: one in use, the next in
        transfer."""
        return max(b.bucket.num_bytes for b in self.buckets)


def plan_weights(
    spec: ModelSpec,
    actor: Layout,
    engine: Layout,
    bucket_size_mib: float = BUCKET_MIB,
    dtype: torch.dtype | None = None,
) -> WeightsPlan:
    """Plan a weight sync. Raises WeightsError: the layout does not fit the model; the message shows
    the arithmetic; UserError: the layout does not fit the model's layers.

    Args:
        actor: Layout of the trainer's ranks; copies of the model do not matter.
        engine: Layout of the engine's ranks. With expert parallelism each has whole experts,
            otherwise a slice of each.
        bucket_size_mib: As in ``cut_into_buckets``.
        dtype: Type of the tensors sent; ``None``: bfloat16.
    """
    if dtype is None:
        dtype = torch.bfloat16
    layers_of = tuple(tuple(map(tuple, stage)) for stage in actor.stage_chunks(spec.layers))
    experts = actor.expert_parallel
    if spec.experts % experts:
        raise WeightsError(
            f"{spec.experts} experts do not divide over {experts} expert-parallel ranks: "
            f"{spec.experts} / {experts} = {spec.experts / experts:.2f}"
        )
    if experts > 1 and not spec.experts:
        raise WeightsError(f"{experts} expert-parallel ranks, but the model has no experts")
    padded = padded_vocab_size(spec.vocab, actor.tensor_parallel)
    stage_of = {
        layer: pp for pp, chunks in enumerate(layers_of) for chunk in chunks for layer in chunk
    }
    gathers: dict[str, list[Operation]] = {}
    loads: dict[str, list[Operation]] = {}
    sizes = hf_shapes(spec)
    for entry, layer, expert in walk(spec):
        if entry.when is When.tied:
            # The last stage's copy of the embedding; the first stage sends the original.
            continue
        stage = _stage(entry, layer, stage_of, actor.pipeline_parallel)
        for op in _gathers(entry, spec, actor, stage, layer, expert, sizes, dtype):
            gathers.setdefault(op.tensor, []).append(op)
        for op in _loads(entry, spec, engine, layer, expert, sizes, dtype):
            loads.setdefault(op.tensor, []).append(op)
    metas = [TensorMeta(name, size, dtype) for name, size in sizes.items()]
    buckets = tuple(
        PlannedBucket(
            bucket,
            tuple(op for t in bucket.tensors for op in _sort(gathers[t.meta.name])),
            tuple(op for t in bucket.tensors for op in loads[t.meta.name]),
        )
        for bucket in cut_into_buckets(metas, bucket_size_mib)
    )
    return WeightsPlan(spec, actor, engine, dtype, layers_of, padded, buckets)


def _stage(entry: Entry, layer: int | None, stage_of: dict[int, int], pp: int) -> int:
    if layer is not None:
        return stage_of[layer]
    return 0 if entry.megatron[0].startswith("embedding.") else pp - 1


def _gathers(
    entry: Entry,
    spec: ModelSpec,
    actor: Layout,
    stage: int,
    layer: int | None,
    expert: int | None,
    sizes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Iterator[Operation]:
    """Runs that each trainer rank sends; the first rank sends the tensors that all have."""
    ep, ranks = 0, actor.tensor_parallel
    padded = padded_vocab_size(spec.vocab, ranks)
    if expert is not None:
        ep = expert // (spec.experts // actor.expert_parallel)
        ranks = actor.expert_tensor_parallel
    for tp in range(1 if entry.rule is Rule.replicated else ranks):
        local = local_tensor(entry, spec, tp, ranks, padded, layer, expert)
        for piece in local.pieces:
            yield _operation(
                piece.hf_name,
                SourceRank(stage, tp, ep),
                (piece.dim, piece.hf_start, piece.length),
                sizes,
                dtype,
            )


def _loads(
    entry: Entry,
    spec: ModelSpec,
    engine: Layout,
    layer: int | None,
    expert: int | None,
    sizes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Iterator[Operation]:
    """Runs that each engine rank keeps of an entry's tensors."""
    for tensor in entry.hf:
        name = tensor.name.format(layer=layer, expert=expert)
        for rank in range(engine.tensor_parallel):
            for run in _engine_runs(entry, tensor.dims, name, rank, spec, engine, expert):
                yield _operation(name, rank, run, sizes, dtype)


def _engine_runs(
    entry: Entry,
    dims: Sequence[str],
    name: str,
    rank: int,
    spec: ModelSpec,
    engine: Layout,
    expert: int | None,
) -> list[tuple[int, int, int]]:
    """(dim, start, length) that an engine rank keeps; empty: nothing."""
    rows, tp = spec.size(dims[0]), engine.tensor_parallel
    if expert is not None and engine.expert_parallel > 1:
        held = share("experts", spec.experts, engine.expert_parallel)
        return [(0, 0, rows)] if expert // held == rank else []
    if entry.rule is Rule.replicated:
        return [(0, 0, rows)]
    if entry.rule is Rule.vocabulary:
        padded = padded_vocab_size(rows, 1, math.lcm(ENGINE_VOCAB_MULTIPLE, tp))
        run = padded // tp
        length = min(run, rows - rank * run)
        return [(0, rank * run, length)] if length > 0 else []
    of_heads = dims[0] in _OF_HEADS and len(dims) > 1
    if entry.rule is Rule.column and not of_heads and dims[0] != "delta_heads":
        # A norm over all heads, or a latent projection: complete on every engine rank.
        return [(0, 0, rows)]
    if dims[0] == "delta_conv":
        return _engine_channels(name, rank, spec, tp)
    if dims[0] == "key_value":
        return [_engine_key_value(name, rank, spec, tp)]
    if dims[0] in _OF_HEADS:
        share(f"{name}: query heads", spec.heads, tp)
    dim = 1 if entry.rule is Rule.row else 0
    run = share(f"{name}: {dims[dim]}", spec.size(dims[dim]), tp)
    return [(dim, rank * run, run)]


def _engine_channels(name: str, rank: int, spec: ModelSpec, tp: int) -> list[tuple[int, int, int]]:
    """A rank's queries, keys and values of linear attention."""
    assert spec.linear is not None
    runs, begin = [], 0
    for width in (spec.linear.key_width, spec.linear.key_width, spec.linear.value_width):
        run = share(f"{name}: heads of linear attention", width, tp)
        runs.append((0, begin + rank * run, run))
        begin += width
    return runs


def _engine_key_value(name: str, rank: int, spec: ModelSpec, tp: int) -> tuple[int, int, int]:
    """With more ranks than key-value heads, several ranks have the same head."""
    groups = spec.kv_heads
    if groups % tp and tp % groups:
        raise WeightsError(
            f"{name}: {groups} key-value heads over {tp} engine ranks: one must divide the other"
        )
    heads = max(1, groups // tp)
    return (0, rank * groups // tp * spec.head_dim, heads * spec.head_dim)


def _operation(
    name: str,
    rank: SourceRank | int,
    run: tuple[int, int, int],
    sizes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Operation:
    dim, start, length = run
    num_bytes = math.prod(sizes[name]) // sizes[name][dim] * length * dtype.itemsize
    return Operation(name, rank, dim, start, length, num_bytes)


def _sort(operations: list[Operation]) -> list[Operation]:
    return sorted(operations, key=lambda op: op.start)
