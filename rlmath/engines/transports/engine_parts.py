"""Location of a Hugging Face folder's tensors in a vLLM worker.

vLLM fuses query, key and value, and gate and up, and shards them over its tensor ranks, so a
worker's parameter consists of runs of rows or columns of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlmath.engines.transports.packed import is_packed_convolution, unpacked_convolution
from rlmath.weights.expert_shares import ExpertShare

# Start of an engine's message that tensors are missing; a worker process passes only text.
UNSENT = "the weight update left"

# Parameters that vLLM computes from a matrix of latent attention; they are not sent.
PRODUCTS = ("W_UK_T", "W_UV")
# Tensors in the matrices that vLLM merges, in their order. Where files have one for all of a merged
# matrix (Qwen3-Next), vLLM's has one run.
_MERGED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


@dataclass(frozen=True)
class Part:
    """A run of a whole tensor in a worker.

    Attributes:
        name: The whole tensor's Hugging Face name.
        module: The layer that has it.
        key: Name of the layer's parameter.
        row: First row of the run in that parameter.
        dim: Dimension of the run in the whole tensor.
        start: First row or column in the whole tensor.
        length: Number of rows or columns.
        replica: Whether another worker of the engine has the same run.
    """

    name: str
    module: Any
    key: str
    row: int
    dim: int
    start: int
    length: int
    replica: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether vLLM packed the parameter for a CPU's kernels."""
        return not getattr(self.module, self.key).numel() or is_packed_convolution(self.module)

    def read(self) -> Tensor:
        """The run in the worker's memory; empty if it is in a packed matrix."""
        parameter: Tensor = getattr(self.module, self.key).data
        if is_packed_convolution(self.module):
            parameter = unpacked_convolution(self.module)
        if not parameter.numel() or self.dim == 1:
            return parameter
        return parameter.narrow(0, self.row, self.length)

    @property
    def corner(self) -> tuple[int, int]:
        """First row and column in the whole tensor."""
        return (self.start, 0) if self.dim == 0 else (0, self.start)

    def of(self, whole: Tensor) -> Tensor:
        """View the run of the whole tensor."""
        return whole.narrow(self.dim, self.start, self.length)


def parts_of(model: Any) -> Iterator[Part]:
    """All parts of a worker's model except an MoE's experts (``experts.py``).

    An output layer that shares the embedding's matrix has no part.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        if not own & seen:
            # With adapters, vLLM has wrapped the layer.
            yield from _of_module(name.removesuffix(".base_layer"), module)
        seen |= own


def _of_module(name: str, module: Any) -> Iterator[Part]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    own = dict(module.named_parameters(recurse=False))
    stem, _, last = name.rpartition(".")
    if isinstance(module, QKVParallelLinear):
        yield from _qkv(stem, module, own)
    elif isinstance(module, MergedColumnParallelLinear) and last in _MERGED:
        sizes = module.output_partition_sizes
        names = _MERGED[last] if len(sizes) > 1 else (last,)
        for key in own:
            yield from _runs([f"{stem}.{one}.{key}" for one in names], module, key, sizes)
    elif hasattr(module, "A_log"):
        # A gated delta net, whose heads tensor ranks share.
        for key, parameter in own.items():
            size = parameter.shape[0]
            yield Part(f"{name}.{key}", module, key, 0, 0, _tensor_rank() * size, size)
        widths = [n // module.tp_size for n in (module.key_dim, module.key_dim, module.value_dim)]
        yield from _runs([f"{name}.conv1d.weight"] * 3, module.conv1d, "weight", widths)
    elif last == "fused_qkv_a_proj":
        # Latent attention: complete on every worker.
        row, replica = 0, _tensor_rank() > 0
        for which, size in zip(
            ("q_a_proj", "kv_a_proj_with_mqa"), module.output_sizes, strict=True
        ):
            name = f"{stem}.{which}.weight"
            yield Part(name, module, "weight", row, 0, 0, size, replica)
            row += size
    elif isinstance(module, ColumnParallelLinear) and last in ("q_b_proj", "kv_b_proj"):
        size = module.output_size_per_partition
        yield Part(f"{name}.weight", module, "weight", 0, 0, module.tp_rank * size, size)
    elif isinstance(module, RowParallelLinear):
        size = module.input_size_per_partition
        yield Part(f"{name}.weight", module, "weight", 0, 1, module.tp_rank * size, size)
        if "weight_scale" in own:
            rows, replica = module.output_size, module.tp_rank > 0
            yield Part(f"{name}.weight_scale", module, "weight_scale", 0, 0, 0, rows, replica)
    elif isinstance(module, ReplicatedLinear) and last in ("gate", "shared_expert_gate"):
        size = module.output_size
        for key in own:
            yield Part(f"{name}.{key}", module, key, 0, 0, 0, size, replica=_tensor_rank() > 0)
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        start, size = shard.org_vocab_start_index, shard.num_org_elements
        yield Part(f"{name}.weight", module, "weight", 0, 0, start, size)
    elif last.endswith("norm"):
        for key, parameter in own.items():
            size = parameter.shape[0]
            yield Part(f"{name}.{key}", module, key, 0, 0, 0, size, replica=_tensor_rank() > 0)


def expert_share(model: Any) -> ExpertShare | None:
    """The share of the experts that vLLM's loader reads for this worker; ``None`` if the model has
    no experts, or its layers read different shares or slices with a gap."""
    found = {_share_of(module) for module in model.modules() if hasattr(module, "w13_weight")}
    return found.pop() if len(found) == 1 else None


def _share_of(module: Any) -> ExpertShare | None:
    ranks, held = module.moe_config.moe_parallel_config, None
    if module.moe_config.tp_shard_with_padding:
        return None
    if module.expert_map is not None:
        places = enumerate(module.expert_map.tolist())
        held = frozenset(expert for expert, place in places if place >= 0)
    return ExpertShare(held, ranks.tp_rank, ranks.tp_size)


def _runs(names: list[str], module: Any, key: str, sizes: list[int]) -> Iterator[Part]:
    """Runs of a rank's shares, one after another; equal names are runs of one tensor."""
    row, whole = 0, dict.fromkeys(names, 0)
    for name, size in zip(names, sizes, strict=True):
        yield Part(name, module, key, row, 0, whole[name] + module.tp_rank * size, size)
        row += size
        whole[name] += module.tp_size * size


def _qkv(stem: str, module: Any, own: dict[str, Tensor]) -> Iterator[Part]:
    heads = {"q": module.num_heads, "k": module.num_kv_heads, "v": module.num_kv_heads}
    # With more ranks than key-value heads, several ranks have the same head.
    replicas = module.num_kv_head_replicas
    for key in own:
        row = 0
        for which, count in heads.items():
            size = count * module.head_size
            place = module.tp_rank // (1 if which == "q" else replicas)
            replica = which != "q" and module.tp_rank % replicas > 0
            name = f"{stem}.{which}_proj.{key}"
            yield Part(name, module, key, row, 0, place * size, size, replica)
            row += size


def _tensor_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
