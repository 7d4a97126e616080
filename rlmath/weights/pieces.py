"""Positions of the parts of Hugging Face tensors in Megatron shards: pure arithmetic.

Every rule of ``families.py`` reduces to rectangles: a run of rows (or columns) of a Hugging Face
tensor is a run of rows (or columns) of one rank's Megatron parameter, complete in the other
dimension. Loading, exporting and planning all iterate over these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlmath.errors import WeightsError
from rlmath.model.families import Entry, HfTensor, Rule
from rlmath.model.spec import LinearAttention, ModelSpec

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
        sections: Rows of each section of a fused matrix, of which every rank has its slice.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    sections: tuple[int, ...] = ()


def table_name(name: str) -> str:
    """Name in the tables of a tensor of the files: transformers keeps a prefix in the files of a
    text model that was taken out of one with images (Qwen3.5)."""
    text = "model.language_model."
    return f"model.{name.removeprefix(text)}" if name.startswith(text) else name


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
        tp_rank: For an expert's entry, the rank in the expert tensor-parallel group.
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
    if entry.rule in _FUSED:
        sections = _FUSED[entry.rule](tensors, spec, tp_size)
        names = {tensor.name: f"{tensor.name}: {tensor.dims[0]}" for tensor in tensors}
        return _slices(sections, names, sizes[0][1:], tp_rank, tp_size)
    dim = 1 if entry.rule is Rule.row else 0
    run = share(f"{tensors[0].name}: {tensors[0].dims[dim]}", sizes[0][dim], tp_size)
    local = tuple(run if d == dim else n for d, n in enumerate(sizes[0]))
    return LocalTensor(local, (Piece(tensors[0].name, dim, tp_rank * run, 0, run),))


# Rows of a Hugging Face tensor: its name, the first row, their number.
_Rows = tuple[str, int, int]
# Rows in Megatron's order, of which each rank has an equal slice.
_Section = list[_Rows]


def _slices(
    sections: list[_Section],
    labels: Mapping[str, str],
    columns: tuple[int, ...],
    tp_rank: int,
    tp_size: int,
) -> LocalTensor:
    """A rank's slice of each section, one after the other."""
    pieces, runs, local = [], [], 0
    for section in sections:
        total = sum(rows for *_, rows in section)
        run = share(labels[section[0][0]], total, tp_size)
        begin, end, at = tp_rank * run, (tp_rank + 1) * run, 0
        for name, first, rows in section:
            low, high = max(at, begin), min(at + rows, end)
            if low < high:
                start = first + low - at
                pieces.append(Piece(name, 0, start, local + low - begin, high - low))
            at += rows
        runs.append(run)
        local += run
    return LocalTensor((local, *columns), tuple(pieces), tuple(runs))


def _gate_up(tensors: Sequence[HfTensor], spec: ModelSpec, _: int) -> list[_Section]:
    return [[(one.name, 0, spec.size(one.dims[0]))] for one in tensors]


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


def _qkv(tensors: Sequence[HfTensor], spec: ModelSpec, tp_size: int) -> list[_Section]:
    query, key, value = (one.name for one in tensors)
    groups, head = spec.kv_heads, spec.head_dim
    if groups % tp_size and tp_size % groups:
        raise WeightsError(
            f"{key}: {groups} key-value heads over TP {tp_size}: one must divide the other"
        )
    share(f"{query}: query heads", spec.heads, tp_size)
    queries, section = spec.heads // groups, []
    for group in range(groups):
        first = group * queries
        if spec.family.gated_attention:
            # Files have each head's query, then its gate.
            heads = range(first, first + queries)
            section += [(query, (2 * n + gate) * head, head) for gate in (0, 1) for n in heads]
        else:
            section.append((query, first * head, queries * head))
        section += [(name, group * head, head) for name in (key, value)]
    return [section]


def _delta_in(tensors: Sequence[HfTensor], spec: ModelSpec, tp_size: int) -> list[_Section]:
    mixed, *others = tensors
    return [*_delta_conv([mixed], spec, tp_size), *_gate_up(others, spec, tp_size)]


def _delta_conv(tensors: Sequence[HfTensor], spec: ModelSpec, tp_size: int) -> list[_Section]:
    name, one = tensors[0].name, _linear(spec)
    share(f"{name}: key heads", one.key_heads, tp_size)
    key = one.key_width
    return [[(name, 0, key)], [(name, key, key)], [(name, 2 * key, one.value_width)]]


def _delta_in_by_head(tensors: Sequence[HfTensor], spec: ModelSpec, tp_size: int) -> list[_Section]:
    one = _linear(spec)
    mixed, scalars = (tensor.name for tensor in tensors)
    share(f"{mixed}: key heads", one.key_heads, tp_size)
    values = one.value_heads // one.key_heads
    key, value = one.key_head_dim, values * one.value_head_dim
    of_head = ((mixed, (key, key, value, value)), (scalars, (values, values)))
    sections = []
    for name, parts in of_head:
        before = 0
        for rows in parts:
            section = [(name, n * sum(parts) + before, rows) for n in range(one.key_heads)]
            sections.append(section)
            before += rows
    return sections


def _linear(spec: ModelSpec) -> LinearAttention:
    assert spec.linear is not None
    return spec.linear


_FUSED: dict[Rule, Callable[[Sequence[HfTensor], ModelSpec, int], list[_Section]]] = {
    Rule.qkv: _qkv,
    Rule.gate_up: _gate_up,
    Rule.delta_in: _delta_in,
    Rule.delta_in_by_head: _delta_in_by_head,
    Rule.delta_conv: _delta_conv,
}


def share(what: str, size: int, ranks: int) -> int:
    """``size / ranks``; ``WeightsError`` with the arithmetic if not divisible."""
    if size % ranks:
        works = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)
        raise WeightsError(
            f"{what} of {size} does not divide over {ranks} ranks: {size} / {ranks} = "
            f"{size / ranks:.2f}; these work: {works}"
        )
    return size // ranks
