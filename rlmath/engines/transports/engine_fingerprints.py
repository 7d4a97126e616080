"""Fingerprints of a vLLM worker's weights, by the names of the Hugging Face folder.

The fingerprint of a tensor is the sum of its parts' (``rlmath.weights.fingerprint``), so each
worker counts its parts at their position in the whole, and the workers' sums add up. Matrices that
a CPU worker packed for its kernels are read back (``packed.py``). An MoE's experts are read if
their kernels keep them as loaded or in a known order; otherwise their fingerprint is ``None``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlmath.engines.transports.engine_parts import Part, parts_of
from rlmath.engines.transports.packed import columns_of, is_packed, unpack
from rlmath.model import fp8
from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.quantized_prints import SCALE
from rlmath.weights.slices import Columns, WeightSlice, columns_in, fingerprint_in

# vLLM's kernels for experts that keep gate and up, in this order, as loaded.
AS_LOADED = ("TRITON", "BATCHED_TRITON")
SWAPPED = "FLASHINFER_CUTLASS"


def worker_fingerprints(worker: Any, part: WeightSlice | None = None) -> dict[str, int | None]:
    """Runs in a vLLM worker: this worker's contributions to the engine's fingerprints. ``worker``:
    vLLM's worker. ``part``: only this slice; ``None``: everything. Returns fingerprints by name;
    ``None``: the tensor cannot be read."""
    model, dtype = worker.model_runner.get_model(), worker.model_config.dtype
    held: dict[str, int | None] = {}
    matrices: dict[int, list[Part]] = {}
    for one in parts_of(model):
        if one.replica or (part is not None and one.name.removesuffix(SCALE) not in part):
            continue
        if one.key.startswith("weight") and getattr(one.module, "weight_scale", None) is not None:
            _count(held, one.name, _of_quantized(one))
            continue
        if is_packed(one.module, one.key):
            matrices.setdefault(id(one.module), []).append(one)
            continue
        values = one.read()
        if one.key in ("bias", "A_log") or values.ndim == 2:
            # vLLM widens biases to float32 on a CPU with matrix units, a router's matrix for
            # precision.router_dtype=float32, and the decays of a gated delta net always.
            values = values.to(dtype)
        _count(held, one.name, fingerprint_in(part, one.name, values, *one.corner))
    for parts in matrices.values():
        for one, of_part in zip(parts, _of_packed(parts, dtype, part), strict=True):
            _count(held, one.name, of_part)
    _prefer_packed_copies(model, held, part)
    _prefer_absorbed(model, held, part)
    for name, value in _experts(model, part):
        _count(held, name, value)
    return held


def engine_fingerprints(workers: list[dict[str, int | None]]) -> dict[str, int | None]:
    """Combine the workers' fingerprints of one engine."""
    total: dict[str, int | None] = {}
    for held in workers:
        for name, value in held.items():
            _count(total, name, value)
    return total


def _count(total: dict[str, int | None], name: str, value: int | None) -> None:
    before = total.get(name, 0)
    total[name] = None if before is None or value is None else add(before, value)


def _of_quantized(part: Part) -> int | None:
    """Fingerprint of a run of an FP8 matrix or of its scales (``rlmath.weights.quantized_prints``).

    ``None``: kernels keep them in an unknown order. vLLM's own, torch's and CUTLASS keep
    ``[columns, rows]`` and a scale per row.
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


def _of_packed(
    parts: list[Part], dtype: torch.dtype, wanted: WeightSlice | None = None
) -> list[int]:
    """Fingerprints of the parts of one packed matrix, which are rows or all of it.

    Args:
        dtype: The model's type; a router's packed matrix may be wider.
        wanted: Only this slice; ``None``: everything.
    """
    module = parts[0].module
    count, held = _inputs(module), getattr(module, parts[0].key).dtype
    # Parts share columns, which are read once.
    of_columns: dict[Columns, list[int]] = {}
    for index, part in enumerate(parts):
        for columns in columns_in(wanted, part.name, part.corner[1], count):
            of_columns.setdefault(columns, []).append(index)
    sums = [0] * len(parts)
    for chosen, indices in of_columns.items():
        for first, values in columns_of(module, count, held, chosen):
            for index in indices:
                part = parts[index]
                rows = values if part.dim == 1 else values.narrow(0, part.row, part.length)
                row, column = part.corner
                found = fingerprint(rows.to(dtype), row, column + first)
                sums[index] = add(sums[index], found)
    return sums


def _inputs(module: Any) -> int:
    """Number of columns of a layer's matrix, its input size."""
    for name in ("embedding_dim", "input_size_per_partition", "input_size"):
        if hasattr(module, name):
            return int(getattr(module, name))
    raise TypeError(f"{type(module).__name__} does not tell the size of its input")


def _prefer_packed_copies(
    model: Any, held: dict[str, int | None], wanted: WeightSlice | None = None
) -> None:
    """Report the packed copy of a matrix that vLLM multiplies with, if it differs from the matrix
    that vLLM keeps too.

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
        if wanted is not None and part.name not in wanted:
            continue
        kept = fingerprint_in(wanted, part.name, part.read(), *part.corner)
        copy, count = 0, module.embedding_dim
        for chosen in columns_in(wanted, part.name, 0, count):
            for first, columns in columns_of(module, count, module.weight.dtype, chosen):
                rows = columns.narrow(0, 0, part.length)
                copy = add(copy, fingerprint(rows, part.start, first))
        if copy != kept:
            _count(held, part.name, add(copy, -kept))


def _prefer_absorbed(
    model: Any, held: dict[str, int | None], wanted: WeightSlice | None = None
) -> None:
    """Report the halves of a matrix that latent attention uses for decoding, if they differ from
    the matrix that it uses for prefill."""
    for name, module in model.named_modules():
        full = f"{name.partition('.self_attn.')[0]}.self_attn.kv_b_proj.weight"
        if not hasattr(module, "W_UK_T") or (wanted is not None and full not in wanted):
            continue
        # [heads, content, rank] and [heads, rank, value].
        both = torch.cat([module.W_UK_T, module.W_UV.transpose(1, 2)], 1).flatten(0, 1)
        part = next(one for one in parts_of(module) if "kv_b_proj" in one.name)
        for low, high in columns_in(wanted, full, 0, both.shape[1]):
            if is_packed(part.module, part.key):
                count, chosen = _inputs(part.module), (low, high)
                columns = columns_of(part.module, count, both.dtype, chosen)
                kept = torch.cat([one for _, one in columns], 1)
            else:
                kept = part.read()[:, low:high]
            halves = both[:, low:high]
            if not torch.equal(halves.to(kept.dtype), kept):
                own, other = (
                    fingerprint(one.contiguous(), part.start, low) for one in (halves, kept)
                )
                _count(held, full, add(own, -other))


def _experts(model: Any, wanted: WeightSlice | None = None) -> Iterator[tuple[str, int | None]]:
    """This worker's contributions for every expert's matrices; in a slice they are complete."""
    for name, module in model.named_modules():
        if not hasattr(module, "w13_weight"):
            continue
        stem = name[: name.rindex(".experts")]
        places = {
            expert: expert if module.expert_map is None else int(module.expert_map[expert])
            for expert in range(module.global_num_experts)
            # A slice contains all matrices of an expert.
            if wanted is None or f"{stem}.experts.{expert}.gate_proj.weight" in wanted
        }
        if not places:
            continue
        here = [place for place in places.values() if place >= 0]
        matrices = _expert_matrices(module, None if wanted is None else here)
        if wanted is not None:
            order = {place: at for at, place in enumerate(here)}
            places = {expert: order.get(place, -1) for expert, place in places.items()}
        ranks = module.moe_config.moe_parallel_config
        size = module.moe_config.intermediate_size_per_partition
        start = ranks.tp_rank * size
        for expert, local in places.items():
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


def _expert_matrices(module: Any, chosen: list[int] | None = None) -> dict[str, Tensor] | None:
    """``gate``, ``up`` and ``down`` ``[experts, rows, columns]`` of a layer, possibly padded at the
    end; ``None`` if the order of their elements is unknown.

    Args:
        chosen: Only these of this worker's experts; ``None``: all.
    """
    from vllm import _custom_ops as ops

    method = module.quant_method
    backend = method.unquantized_backend.name
    w13, w2 = module.w13_weight.data, module.w2_weight.data
    if chosen is not None:
        w13, w2 = w13[chosen], w2[chosen]
    if backend == "CPU":
        kernel = method.moe_kernel.fused_experts
        if getattr(kernel, "_use_zentorch", True):
            return None

        def pack(one: Tensor) -> Tensor:
            packed: Tensor = ops.cpu_prepack_moe_weight(one, kernel.isa)
            return packed

        orders = unpack(w13, pack), unpack(w2, pack)
        if orders[0] is None or orders[1] is None:
            return None
        w13, w2 = orders[0], orders[1]
    elif backend not in (*AS_LOADED, SWAPPED):
        return None
    first, second = torch.chunk(w13, 2, dim=1)
    gate, up = (second, first) if backend == SWAPPED else (first, second)
    return {"gate": gate, "up": up, "down": w2}
