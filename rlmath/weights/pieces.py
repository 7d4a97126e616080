"""Positions of the parts of Hugging Face tensors in Megatron shards: pure arithmetic.

Every rule of ``families.py`` reduces to rectangles: a run of rows (or columns) of a Hugging Face
tensor is a run of rows (or columns) of one rank's Megatron parameter, complete in the other
dimension. Loading, exporting and planning all iterate over these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlmath.errors import WeightsError
from rlmath.model.families import Entry, HfTensor, Rule
from rlmath.model.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
UNTIED_HEAD = (
    f"config.json says tie_word_embeddings=true, and {HEAD} in the files differs from {EMBEDDING}: "
    "transformers and vLLM would compute with it; set tie_word_embeddings to false, or remove the "
    "tensor"
)
NOT_FINITE = "holds NaN or infinity; use the files that were published, or an earlier checkpoint"


@dataclass(frozen=True)
class Piece:
    """A run of a Hugging Face tensor in one Megatron parameter of one rank."""

    hf_name: str  # The Hugging Face tensor.
    dim: int  # Dimension of the run: 0 for rows, 1 for columns.
    hf_start: int  # Start of the run in the Hugging Face tensor.
    local_start: int  # Start of the run in the rank's parameter.
    length: int  # Number of rows or columns.


@dataclass(frozen=True)
class LocalTensor:
    """One rank's part of a table entry, for one layer and expert.

    Attributes:
        shape: Shape of the rank's Megatron parameter.
        pieces: The pieces of its rows or columns; vocabulary padding belongs to no piece.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of the model, in the order of sending.

    The files may fuse several of them (``file_tensors``).

    The order is that of the model: embedding, layers, final norm, output layer.
    """
    result: dict[str, tuple[int, ...]] = {}
    for entry, layer, expert in walk(spec):
        for tensor in entry.hf:
            name = tensor.name.format(layer=layer, expert=expert)
            result.setdefault(name, tuple(spec.size(dim) for dim in tensor.dims))
    return result


def expert_tensors(spec: ModelSpec) -> dict[str, int]:
    """The expert number of each expert tensor, by name."""
    return {
        tensor.name.format(layer=layer, expert=expert): expert
        for entry, layer, expert in walk(spec)
        if expert is not None
        for tensor in entry.hf
    }


def file_tensors(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The tensors of ``hf_shapes`` in each tensor of the model's files, in row order.

    There is one, with the file's name, unless the family's files fuse matrices.
    """
    result: dict[str, list[str]] = {}
    for name in hf_shapes(spec):
        file = name
        for fused in spec.family.fused:
            for part in fused.parts:
                if name.endswith(part):
                    file = name.removesuffix(part) + fused.file
        result.setdefault(file, []).append(name)
    return {file: tuple(names) for file, names in result.items()}


def file_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model's files, in the order of ``hf_shapes``."""
    shapes = hf_shapes(spec)
    if not spec.family.fused:
        return shapes
    return {
        file: (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
        for file, names in file_tensors(spec).items()
    }


def misfits(spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors of a Hugging Face folder that are missing, unknown or of another shape, as text.
    ``spec``: the model spec from config.json. ``found``: shape of each tensor in the files."""
    expected = file_shapes(spec)
    ignored = spec.family.ignored_suffixes
    prefixes = tuple(p.format(layers=spec.layers) for p in spec.family.ignored_prefixes)
    if spec.tied:
        # Some files contain the tied output layer too. That it is equal is checked.
        ignored = (*ignored, HEAD)
    present = {
        name for name in found if not name.endswith(ignored) and not name.startswith(prefixes)
    }
    return [
        *(f"{n} {expected[n]} is missing" for n in expected if n not in present),
        *(f"{n} {found[n]} is unknown" for n in sorted(present) if n not in expected),
        *(
            f"{n} is {found[n]}, config.json says {expected[n]}"
            for n in expected
            if n in present and found[n] != expected[n]
        ),
    ]


def first_of(problems: list[str]) -> str:
    """Up to five problems, and the number of the others."""
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more


def walk(spec: ModelSpec) -> Iterator[tuple[Entry, int | None, int | None]]:
    """Every (entry, layer, expert) of the model, in model order; ``None`` if not applicable."""
    entries = spec.family.entries
    first = next(i for i, entry in enumerate(entries) if entry.per_layer)
    in_layers = [entry for entry in entries if entry.per_layer]
    for entry in entries[:first]:
        if spec.has(entry):
            yield entry, None, None
    for layer in range(spec.layers):
        for entry in in_layers:
            if not spec.has(entry, layer) or entry.per_expert:
                continue
            yield entry, layer, None
        for expert in range(spec.experts if spec.is_moe_layer(layer) else 0):
            for entry in in_layers:
                if entry.per_expert:
                    yield entry, layer, expert
    for entry in entries[first:]:
        if not entry.per_layer and spec.has(entry):
            yield entry, None, None


def local_tensor(
    entry: Entry,
    spec: ModelSpec,
    tp_rank: int,
    tp_size: int,
    padded_vocab: int,
    layer: int | None = None,
    expert: int | None = None,
) -> LocalTensor:
    """The part of an entry on tensor rank ``tp_rank`` of ``tp_size``. Raises WeightsError: the
    tensor is not divisible by the ranks.

    Args:
        entry: Entry of the family's table.
        spec: The model spec.
        tp_rank: For an expert's entry, the rank in the expert tensor-parallel group.
        tp_size: Size of that group.
        padded_vocab: Rows of the embedding over all ranks, with padding; used only by the
            vocabulary rule.
        layer: Global number from 0, for entries of a layer.
        expert: Global number from 0, for entries of an expert.
    """
    tensors = tuple(HfTensor(t.name.format(layer=layer, expert=expert), t.dims) for t in entry.hf)
    sizes = [tuple(spec.size(dim) for dim in t.dims) for t in tensors]
    if entry.rule is Rule.replicated:
        name, size = tensors[0].name, sizes[0]
        return LocalTensor(size, (Piece(name, 0, 0, 0, size[0]),))
    if entry.rule is Rule.vocabulary:
        return _vocabulary(tensors[0].name, sizes[0], tp_rank, tp_size, padded_vocab)
    if entry.rule is Rule.qkv:
        return _qkv([t.name for t in tensors], sizes[0], spec, tp_rank, tp_size)
    dim = 1 if entry.rule is Rule.row else 0
    what = f"{tensors[0].name}: {tensors[0].dims[dim]}"
    run = share(what, sizes[0][dim], tp_size)
    if entry.rule is Rule.gate_up:
        pieces = tuple(Piece(t.name, 0, tp_rank * run, i * run, run) for i, t in enumerate(tensors))
        return LocalTensor((len(tensors) * run, *sizes[0][1:]), pieces)
    local = tuple(run if d == dim else n for d, n in enumerate(sizes[0]))
    return LocalTensor(local, (Piece(tensors[0].name, dim, tp_rank * run, 0, run),))


def _vocabulary(
    name: str, size: tuple[int, ...], tp_rank: int, tp_size: int, padded_vocab: int
) -> LocalTensor:
    if padded_vocab < size[0]:
        raise WeightsError(
            f"{name}: {size[0]} rows do not fit into {padded_vocab} rows over TP {tp_size}"
        )
    run = share(f"{name}: padded vocabulary", padded_vocab, tp_size)
    start = tp_rank * run
    length = min(run, size[0] - start)
    pieces = (Piece(name, 0, start, 0, length),) if length > 0 else ()
    return LocalTensor((run, *size[1:]), pieces)


def _qkv(
    names: list[str], query_size: tuple[int, ...], spec: ModelSpec, tp_rank: int, tp_size: int
) -> LocalTensor:
    """The rank's run of rows, split at the boundaries of query, key and value heads."""
    groups, head = spec.kv_heads, spec.head_dim
    if groups % tp_size and tp_size % groups:
        raise WeightsError(
            f"{names[1]}: {groups} key-value heads over TP {tp_size}: one must divide the other"
        )
    share(f"{names[0]}: query heads", spec.heads, tp_size)
    queries = spec.heads // groups * head
    run = share(f"{names[0]}: rows of query, key and value", groups * (queries + 2 * head), tp_size)
    begin, end = tp_rank * run, (tp_rank + 1) * run
    pieces = []
    at = 0
    for group in range(groups):
        for name, rows in zip(names, (queries, head, head), strict=True):
            low, high = max(at, begin), min(at + rows, end)
            if low < high:
                start = group * rows + low - at
                pieces.append(Piece(name, 0, start, low - begin, high - low))
            at += rows
    return LocalTensor((run, *query_size[1:]), tuple(pieces))


def share(what: str, size: int, ranks: int) -> int:
    """``size / ranks``; ``WeightsError`` with the arithmetic if not divisible."""
    if size % ranks:
        works = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)
        raise WeightsError(
            f"{what} of {size} does not divide over {ranks} ranks: {size} / {ranks} = "
            f"{size / ranks:.2f}; these work: {works}"
        )
    return size // ranks
