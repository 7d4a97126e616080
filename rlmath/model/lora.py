"""Low-rank adapters (LoRA, arXiv:2106.09685): adapted matrices and the shapes of adapters.

A frozen matrix ``W [out, in]`` of the model's files is used as ``W + alpha / rank * B A`` with the
trained ``A [rank, in]`` and ``B [out, rank]``. Names are those of the files
(``model.layers.0.self_attn.q_proj``), which PEFT uses too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.model.families import Entry, Rule
from rlmath.model.spec import ModelSpec

# Matrices of a layer, in file order; each expert has those of the feed-forward. Routers, embeddings
# and the output layer have no adapters.
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
TARGETS = ATTENTION_TARGETS + MLP_TARGETS
# Replace the first three in multi-head latent attention; o_proj stays.
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# Matrices of linear attention: Qwen3.5's, then Qwen3-Next's, then those of both.
DELTA_TARGETS = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj"),
)
ALL_TARGETS = TARGETS + LATENT_TARGETS + DELTA_TARGETS
# Maximum elements of a matrix merged with its adapter, in float32, at once.
MERGED_ELEMENTS = 1 << 24
# Ranks for which vLLM 0.32 has memory and kernels; adapters of lower rank are padded with zeros.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Lora:
    rank: int  # Columns of B and rows of A, at least 1.
    alpha: float  # The product is scaled by alpha / rank.
    targets: tuple[str, ...]  # Some of model_targets, in that order.
    layers: tuple[int, ...] | None = None  # Layer numbers from 0, ascending; None: all.
    # PEFT folder of the initial adapters; None: A is random and B is 0.
    init_from: str | None = None
    seed: int = 0  # Seed of the random A.

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, tensor: str) -> bool:
        """Whether a tensor of the files, given by name, has an adapter."""
        module = tensor.removesuffix(_WEIGHT)
        if module == tensor or module.rpartition(".")[2] not in self.targets:
            return False
        return self.layers is None or int(module.split(".")[2]) in self.layers

    def layers_of(self, spec: ModelSpec) -> tuple[int, ...]:
        return tuple(range(spec.layers)) if self.layers is None else self.layers


def rank_in_vllm(rank: int) -> int:
    """The rank to which an engine pads adapters of this rank. Raises ValueError: vLLM does not
    support this rank."""
    for possible in VLLM_RANKS:
        if rank <= possible:
            return possible
    raise ValueError(f"vLLM's adapters have ranks up to {VLLM_RANKS[-1]}, not {rank}")


def model_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Matrices that can have adapters in this model's family, in the order of its table."""
    found: dict[str, None] = {}
    for entry in spec.family.entries:
        if entry.per_layer and entry.rule is not Rule.replicated:
            matrices = (tensor.name for tensor in entry.hf if len(tensor.dims) == 2)
            found |= dict.fromkeys(name.split(".")[-2] for name in matrices)
    return tuple(found)


def default_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Default targets of a model: all; in an MoE, only those of attention. Adapters of experts must
    be requested, because each expert has its own."""
    possible = model_targets(spec)
    return tuple(t for t in possible if t not in MLP_TARGETS) if spec.experts else possible


def lora_a(tensor: str) -> str:
    """Name of a tensor's ``A`` in the model."""
    return tensor.removesuffix(_WEIGHT) + ".lora_A.weight"


def lora_b(tensor: str) -> str:
    """Name of a tensor's ``B`` in the model."""
    return tensor.removesuffix(_WEIGHT) + ".lora_B.weight"


def adapted_entries(spec: ModelSpec, lora: Lora) -> Iterator[tuple[Entry, int]]:
    """Entries of the family's table, with the layer, that have a matrix with an adapter; those of
    experts once per layer."""
    for layer in lora.layers_of(spec):
        for entry in spec.family.entries:
            if not entry.per_layer or entry.rule is Rule.replicated:
                continue
            names = [tensor.name.format(layer=layer, expert=0) for tensor in entry.hf]
            if spec.has(entry, layer) and any(map(lora.adapts, names)):
                yield entry, layer


def adapter_shapes(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, int]]:
    """Name and shape of every ``A`` and ``B``, in model order."""
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
    return any(entry.per_expert for entry, _ in adapted_entries(spec, lora))


def adapter_parameters(spec: ModelSpec, lora: Lora) -> int:
    return sum(rows * columns for rows, columns in adapter_shapes(spec, lora).values())


def describe(lora: Lora) -> dict[str, Any]:
    """Properties that must match for adapters to be loaded, for a checkpoint."""
    layers = None if lora.layers is None else list(lora.layers)
    return {
        "rank": lora.rank,
        "alpha": float(lora.alpha),
        "targets": list(lora.targets),
        "layers": layers,
    }


def from_described(saved: dict[str, Any]) -> Lora:
    """The adapters that :func:`describe` describes."""
    layers = saved["layers"]
    return Lora(
        saved["rank"],
        saved["alpha"],
        tuple(saved["targets"]),
        None if layers is None else tuple(layers),
    )
