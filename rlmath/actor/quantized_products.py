"""The actor's matrix products as computed by engines with ``rollout.quantization=fp8``, and its
attention with keys and values as with ``rollout.kv_cache_dtype=fp8``.

Used only to measure how far an engine in FP8 may differ: the gate recomputes some of a step's
log-probs with matrices and their inputs in FP8. If a layer's norm and matrix are one kernel
(Transformer Engine's), the input is not accessible, and only its matrix is in FP8. Kernels for GPUs
may have the queries in FP8 too, which is not reproduced here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlmath.model.fp8 import round_cached, round_values

# Megatron's names of the matrices of a layer; an engine's output layer is not quantized.
MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Its name of the module with a layer's rotated and normalized queries, keys and values.
ATTENTION = "core_attention"


@contextlib.contextmanager
def quantized_products(module: nn.Module) -> Iterator[None]:
    """Let a rank's stage multiply in FP8.

    The weight of one matrix at a time is replaced, so this needs memory for only one matrix.
    ``module``: a rank's stage.
    """
    kept: dict[int, torch.Tensor] = {}
    merged: set[int] = set()

    @torch.no_grad()
    def before(matrix: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        weight = kept[id(matrix)] = matrix.weight.data
        adapter = getattr(matrix, "adapter", None)
        if adapter is not None and adapter.enabled:
            # Engines get the sum, and quantize that.
            weight = adapter.merge(weight, adapter.a.data, adapter.b.data, 0, 0)
            adapter.enabled = False
            merged.add(id(matrix))
        matrix.weight.data = round_values(weight)
        if "LayerNorm" in type(matrix).__name__:
            return arguments
        return (round_values(arguments[0]), *arguments[1:])

    def after(matrix: Any, arguments: Any, output: Any) -> None:
        matrix.weight.data = kept.pop(id(matrix))
        if id(matrix) in merged:
            matrix.adapter.enabled = True
            merged.remove(id(matrix))

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            if name.rpartition(".")[2] in MATRICES:
                for handle in (
                    part.register_forward_pre_hook(before),
                    part.register_forward_hook(after, always_call=True),
                ):
                    stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def quantized_cache(module: nn.Module) -> Iterator[None]:
    """Let a rank's stage attend to keys and values rounded to FP8. ``module``: a rank's stage."""

    @torch.no_grad()
    def before(attention: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = arguments
        return query, round_cached(key), round_cached(value), *rest

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            if name.rpartition(".")[2] == ATTENTION:
                stack.callback(part.register_forward_pre_hook(before).remove)
        yield
