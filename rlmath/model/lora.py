"""Low-rank adapters (LoRA, arXiv:2106.09685): which matrices have one, and of what shape.

A matrix ``W [out, in]`` of the model's files, frozen, is used as ``W + alpha / rank * B A`` with
``A [rank, in]`` and ``B [out, rank]``, which are trained. Names are those of the files
(``model.layers.0.self_attn.q_proj``), in which PEFT counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.model.families import Entry, Rule
from rlmath.model.spec import ModelSpec

# Of a layer, in the order of the files; those of the feed-forward are of each expert as well.
# Routers, embeddings and the output layer have no adapters.
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
TARGETS = ATTENTION_TARGETS + MLP_TARGETS
# Multi-head latent attention has these in place of the first three, and o_proj as well.
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
ALL_TARGETS = TARGETS + LATENT_TARGETS
# Of a matrix that is merged with its adapter, in float32 at once.
MERGED_ELEMENTS = 1 << 24
# Ranks that vLLM 0.32 has memory and kernels for; an adapter of a lower one is padded with zeros.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
        rank: Columns of ``B`` and rows of ``A``, at least 1.
        alpha: The product is scaled by ``alpha / rank``.
        targets: Some of ``model_targets``, in that order.
        layers: Global numbers from 0, ascending; ``None``: all.
        init_from: PEFT folder of the adapters to begin with; ``None``: ``A`` is drawn at random and
            ``B`` is 0.
        seed: Of the draw.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    init_from: str | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, tensor: str) -> bool:
        """Whether a tensor of the files, by its name, has an adapter."""
        module = tensor.removesuffix(_WEIGHT)
        if module == tensor or module.rpartition(".")[2] not in self.targets:
            return False
        return self.layers is None or int(module.split(".")[2]) in self.layers

    def layers_of(self, spec: ModelSpec) -> tuple[int, ...]:
        """Numbers of the layers that have adapters."""
        return tuple(range(spec.layers)) if self.layers is None else self.layers


def rank_in_vllm(rank: int) -> int:
    """The rank that an engine's adapters of this rank are padded to.

    Raises:
        ValueError: vLLM has none.
    """
    for possible in VLLM_RANKS:
        if rank <= possible:
            return possible
    raise ValueError(f"vLLM's adapters have ranks up to {VLLM_RANKS[-1]}, not {rank}")


def model_targets(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices that can have adapters in a model of this family, in the order of its table."""
    found: dict[str, None] = {}
    for entry in spec.family.entries:
        if entry.per_layer and entry.rule is not Rule.replicated:
            matrices = (tensor.name for tensor in entry.hf if len(tensor.dims) == 2)
            found |= dict.fromkeys(name.split(".")[-2] for name in matrices)
    return tuple(found)


def default_targets(spec: ModelSpec) -> tuple[str, ...]:
    """The targets of a model where none are given: all; of an MoE, those of attention. Adapters of
    experts must be asked for, because each expert has its own."""
    possible = model_targets(spec)
    return tuple(t for t in possible if t not in MLP_TARGETS) if spec.experts else possible


def lora_a(tensor: str) -> str:
    """Name of a tensor's ``A``, within the model."""
    return tensor.removesuffix(_WEIGHT) + ".lora_A.weight"


def lora_b(tensor: str) -> str:
    """Name of a tensor's ``B``, within the model."""
    return tensor.removesuffix(_WEIGHT) + ".lora_B.weight"


def adapted_entries(spec: ModelSpec, lora: Lora) -> Iterator[tuple[Entry, int]]:
    """Entries of the family's table, with the layer, that hold a matrix with an adapter; those of
    experts once for all of a layer."""
    for layer in lora.layers_of(spec):
        for entry in spec.family.entries:
            if not entry.per_layer or entry.rule is Rule.replicated:
                continue
            names = [tensor.name.format(layer=layer, expert=0) for tensor in entry.hf]
            if spec.has(entry, layer) and any(map(lora.adapts, names)):
                yield entry, layer


def adapter_shapes(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, int]]:
    """Name and shape of every ``A`` and ``B``, in the order of the model."""
    result: dict[str, tuple[int, int]] = {}
    for entry, layer in adapted_entries(spec, lora):
        for expert in range(spec.experts if entry.per_expert else 1):
            for tensor in entry.hf:
                name = tensor.name.format(layer=layer, expert=expert)
                if lora.adapts(name):
                    rows, columns = (spec.size(dim) for dim in tensor.dims)
                    result[lora_a(name)] = (lora.rank, columns)
                    result[lora_b(name)] = (rows, lora.rank)
    return result


def adapts_experts(spec: ModelSpec, lora: Lora) -> bool:
    """Whether experts have adapters."""
    return any(entry.per_expert for entry, _ in adapted_entries(spec, lora))


def adapter_parameters(spec: ModelSpec, lora: Lora) -> int:
    """Parameters that are trained, in the whole model."""
    return sum(rows * columns for rows, columns in adapter_shapes(spec, lora).values())


def described(lora: Lora) -> dict[str, Any]:
    """What has to be equal for adapters to be loaded into others, for a checkpoint."""
    layers = None if lora.layers is None else list(lora.layers)
    return {
        "rank": lora.rank,
        "alpha": float(lora.alpha),
        "targets": list(lora.targets),
        "layers": layers,
    }


def from_described(saved: dict[str, Any]) -> Lora:
    """The adapters that :func:`described` describes."""
    layers = saved["layers"]
    return Lora(
        saved["rank"],
        saved["alpha"],
        tuple(saved["targets"]),
        None if layers is None else tuple(layers),
    )
