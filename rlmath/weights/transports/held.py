"""Fingerprints of what a vLLM worker holds, by the names of the Hugging Face folder.

vLLM fuses query, key and value, and gate and up, and shares each between its tensor ranks. The
fingerprint of a tensor is the sum of its parts' (``rlmath.weights.fingerprint``), so each worker
counts what it holds, at its place in the whole, and the workers' sums add up.

A CPU worker packs matrices into a form of oneDNN's and keeps no tensor that could be read. For
these stands what the transport handed to vLLM: a fault between there and the packed form is left
to the comparison of log-probs. Experts are counted as they arrived as well; where the transport has
no place for that (vLLM's own, on GPUs) nothing is known of them, and their fingerprint is ``None``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlmath.weights.fingerprint import add, fingerprint

# (Hugging Face name, part, dim along which it is one, its first row or column)
_Part = tuple[str, Tensor, int, int]


def worker_fingerprints(
    worker: Any,
) -> tuple[dict[str, int], dict[str, int], dict[str, None]]:
    """Runs in a vLLM worker.

    Returns:
        This worker's shares of what the engine holds; what it was given in the last update, if that
        one was to be verified; and the tensors that cannot be read.
    """
    model = worker.model_runner.get_model()
    held: dict[str, int] = {}
    unread: dict[str, None] = {}
    for name, module in model.named_modules():
        unread |= dict.fromkeys(_experts(name, module))
        for hf_name, part, dim, start in _parts(name, module):
            held[hf_name] = add(held.get(hf_name, 0), fingerprint(part.detach(), dim, start))
    received = getattr(worker.weight_transfer_engine, "received", {})
    return held, dict(received), unread


def engine_fingerprints(
    workers: list[tuple[dict[str, int], dict[str, int], dict[str, None]]],
) -> dict[str, int | None]:
    """One engine's fingerprints from its workers': what is held where that can be read."""
    total: dict[str, int] = {}
    for held, _, _ in workers:
        for name, value in held.items():
            total[name] = add(total.get(name, 0), value)
    # Every worker is given whole tensors.
    _, received, unread = workers[0]
    return unread | received | total


def _experts(name: str, module: Any) -> Iterator[str]:
    """Hugging Face names of a mixture's tensors, which kernels lay out in their own ways."""
    if not hasattr(module, "w13_weight"):
        return
    mlp = name[: name.rindex(".experts")]
    yield f"{mlp}.gate.weight"
    for expert in range(module.global_num_experts):
        for which in ("gate", "up", "down"):
            yield f"{mlp}.experts.{expert}.{which}_proj.weight"


def _parts(name: str, module: Any) -> Iterator[_Part]:
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    own = {k: p for k, p in module.named_parameters(recurse=False) if p.numel()}
    if not own:
        return
    stem, _, last = name.rpartition(".")
    if isinstance(module, QKVParallelLinear):
        yield from _qkv(stem, module, own)
    elif isinstance(module, MergedColumnParallelLinear) and last == "gate_up_proj":
        sizes = module.output_partition_sizes
        for key, parameter in own.items():
            for which, part in zip(("gate", "up"), parameter.split(sizes), strict=True):
                yield f"{stem}.{which}_proj.{key}", part, 0, module.tp_rank * part.size(0)
    elif isinstance(module, RowParallelLinear):
        weight = own["weight"]
        yield f"{name}.weight", weight, 1, module.tp_rank * weight.size(1)
    elif isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        rows = own["weight"][: shard.num_org_elements]
        yield f"{name}.weight", rows, 0, shard.org_vocab_start_index
    elif last.endswith("norm") and _tensor_rank() == 0:
        for key, parameter in own.items():
            yield f"{name}.{key}", parameter, 0, 0


def _qkv(stem: str, module: Any, own: dict[str, Tensor]) -> Iterator[_Part]:
    size, rank = module.head_size, module.tp_rank
    sizes = [module.num_heads * size, module.num_kv_heads * size, module.num_kv_heads * size]
    # With more ranks than key-value heads, several ranks hold the same head; one of them counts.
    replicas = module.num_kv_head_replicas
    for key, parameter in own.items():
        for which, part in zip("qkv", parameter.split(sizes), strict=True):
            if which != "q" and rank % replicas:
                continue
            place = rank if which == "q" else rank // replicas
            yield f"{stem}.{which}_proj.{key}", part, 0, place * part.size(0)


def _tensor_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
