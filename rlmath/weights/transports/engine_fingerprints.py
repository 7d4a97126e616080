"""Fingerprints of what a vLLM worker computes with, by the names of the Hugging Face folder.

The fingerprint of a tensor is the sum of its parts' (``rlmath.weights.fingerprint``), so each
worker counts what it holds, at its place in the whole, and the workers' sums add up. What a CPU
worker packed for its kernels is read back (``packed.py``). An MoE's experts are read where their
kernels keep them as they were loaded, or in an order that is known; elsewhere their fingerprint is
``None``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlmath.model import fp8
from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.transports.engine_parts import Part, parts_of
from rlmath.weights.transports.packed import columns_of, is_packed, unpacked

# vLLM's kernels for experts that keep gate and up, in this order, as they were loaded.
AS_LOADED = ("TRITON", "BATCHED_TRITON")
SWAPPED = "FLASHINFER_CUTLASS"


def worker_fingerprints(worker: Any) -> dict[str, int | None]:
    """Runs in a vLLM worker: this worker's shares of what the engine holds; ``None``: a tensor that
    cannot be read."""
    model, dtype = worker.model_runner.get_model(), worker.model_config.dtype
    held: dict[str, int | None] = {}
    matrices: dict[int, list[Part]] = {}
    for part in parts_of(model):
        if part.replica:
            continue
        if part.key.startswith("weight") and getattr(part.module, "weight_scale", None) is not None:
            _count(held, part.name, _of_quantized(part))
            continue
        if is_packed(part.module, part.key):
            matrices.setdefault(id(part.module), []).append(part)
            continue
        values = part.held()
        if part.key == "bias" or values.ndim == 2:
            # vLLM widens biases to float32 where a CPU has matrix units, and a router's matrix for
            # precision.router_dtype=float32.
            values = values.to(dtype)
        _count(held, part.name, fingerprint(values, *part.corner))
    for parts in matrices.values():
        for part, of_part in zip(parts, _of_packed(parts, dtype), strict=True):
            _count(held, part.name, of_part)
    _prefer_packed_copies(model, held)
    _prefer_absorbed(model, held)
    for name, value in _experts(model):
        _count(held, name, value)
    return held


def engine_fingerprints(workers: list[dict[str, int | None]]) -> dict[str, int | None]:
    """One engine's fingerprints from its workers'."""
    total: dict[str, int | None] = {}
    for held in workers:
        for name, value in held.items():
            _count(total, name, value)
    return total


def _count(total: dict[str, int | None], name: str, value: int | None) -> None:
    before = total.get(name, 0)
    total[name] = None if before is None or value is None else add(before, value)


def _of_quantized(part: Part) -> int | None:
    """Of a run of a matrix in FP8, or of its scales (``rlmath.weights.quantized_prints``).

    ``None``: kernels keep them in an order that is not known. vLLM's own, torch's and CUTLASS, keep
    ``[columns, rows]`` and a scale for each row.
    """
    module = part.module
    weight, scale = module.weight.data, module.weight_scale.data
    if weight.dtype != fp8.DTYPE or scale.numel() != weight.shape[1]:
        return None
    rows, scales = weight.t(), scale.reshape(-1, 1)
    if part.dim == 0:
        rows, scales = (one.narrow(0, part.row, part.length) for one in (rows, scales))
    if part.key == "weight":
        return fingerprint(rows.contiguous().view(torch.uint8), *part.corner)
    return fingerprint(scales, part.start)


def _of_packed(parts: list[Part], dtype: torch.dtype) -> list[int]:
    """Fingerprints of the parts of one packed matrix, of which they are rows or all of it.

    Args:
        parts: Of one module.
        dtype: Of the model, which a router's packed matrix may be wider than.
    """
    module = parts[0].module
    sums = [0] * len(parts)
    for first, columns in columns_of(module, _inputs(module), getattr(module, parts[0].key).dtype):
        for index, part in enumerate(parts):
            rows = columns if part.dim == 1 else columns.narrow(0, part.row, part.length)
            rows = rows.to(dtype)
            row, column = part.corner
            sums[index] = add(sums[index], fingerprint(rows, row, column + first))
    return sums


def _inputs(module: Any) -> int:
    """Columns of a layer's matrix: the size of its input."""
    for name in ("embedding_dim", "input_size_per_partition", "input_size"):
        if hasattr(module, name):
            return int(getattr(module, name))
    raise TypeError(f"{type(module).__name__} does not tell the size of its input")


def _prefer_packed_copies(model: Any, held: dict[str, int | None]) -> None:
    """Where vLLM multiplies with a packed copy of a matrix that it also keeps, and the two differ,
    report the copy.

    That is the output layer on CPU: its own matrix, or the embedding's.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    owners = {
        id(getattr(part.module, part.key)): part
        for part in parts_of(model)
        if not is_packed(part.module, part.key)
    }
    for module in model.modules():
        if not isinstance(module, ParallelLMHead) or not hasattr(module, "cpu_linear"):
            continue
        part = owners[id(module.weight)]
        kept = fingerprint(part.held(), *part.corner)
        copy = 0
        for first, columns in columns_of(module, module.embedding_dim, module.weight.dtype):
            rows = columns.narrow(0, 0, part.length)
            copy = add(copy, fingerprint(rows, part.start, first))
        if copy != kept:
            _count(held, part.name, add(copy, -kept))


def _prefer_absorbed(model: Any, held: dict[str, int | None]) -> None:
    """Where the halves of a matrix that latent attention decodes with are others than the matrix
    that it reads prompts with, report the halves."""
    for name, module in model.named_modules():
        if not hasattr(module, "W_UK_T"):
            continue
        # [heads, content, rank] and [heads, rank, value].
        both = torch.cat([module.W_UK_T, module.W_UV.transpose(1, 2)], 1).flatten(0, 1)
        part = next(one for one in parts_of(module) if "kv_b_proj" in one.name)
        stem = name.partition(".self_attn.")[0]
        full = f"{stem}.self_attn.kv_b_proj.weight"
        if is_packed(part.module, part.key):
            columns = columns_of(part.module, _inputs(part.module), both.dtype)
            kept = torch.cat([one for _, one in columns], 1)
        else:
            kept = part.held()
        if not torch.equal(both.to(kept.dtype), kept):
            own, other = (fingerprint(one.contiguous(), part.start) for one in (both, kept))
            _count(held, full, add(own, -other))


def _experts(model: Any) -> Iterator[tuple[str, int | None]]:
    """Of every expert's matrices, this worker's share."""
    for name, module in model.named_modules():
        if not hasattr(module, "w13_weight"):
            continue
        stem = name[: name.rindex(".experts")]
        matrices = _expert_matrices(module)
        ranks = module.moe_config.moe_parallel_config
        size = module.moe_config.intermediate_size_per_partition
        start = ranks.tp_rank * size
        for expert in range(module.global_num_experts):
            local = expert if module.expert_map is None else int(module.expert_map[expert])
            for which in ("gate", "up", "down"):
                full = f"{stem}.experts.{expert}.{which}_proj.weight"
                if matrices is None:
                    yield full, None
                elif local < 0:
                    yield full, 0
                elif which == "down":
                    part = matrices["down"][local][:, :size]
                    yield full, fingerprint(part, 0, start)
                else:
                    yield full, fingerprint(matrices[which][local][:size], start)


def _expert_matrices(module: Any) -> dict[str, Tensor] | None:
    """``gate``, ``up`` and ``down`` ``[experts, rows, columns]`` of a layer, perhaps padded at the
    end; ``None`` where the order of their elements is not known."""
    method = module.quant_method
    backend = method.unquantized_backend.name
    w13, w2 = module.w13_weight.data, module.w2_weight.data
    if backend == "CPU":
        kernel = method.moe_kernel.fused_experts
        if getattr(kernel, "_use_zentorch", True):
            return None
        orders = unpacked(w13, kernel.isa), unpacked(w2, kernel.isa)
        if orders[0] is None or orders[1] is None:
            return None
        w13, w2 = orders[0], orders[1]
    elif backend not in (*AS_LOADED, SWAPPED):
        return None
    first, second = torch.chunk(w13, 2, dim=1)
    gate, up = (second, first) if backend == SWAPPED else (first, second)
    return {"gate": gate, "up": up, "down": w2}
