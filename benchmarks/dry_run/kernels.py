"""Allocations of a GPU's fused kernels, on meta tensors.

torch computes a norm on meta tensors operator by operator in float32, and attention with all its
scores, which on a GPU one kernel does. These allocate what the kernels give and keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FusedRmsNorm(torch.autograd.Function):
    """``torch.ops.aten._fused_rms_norm`` on CUDA: keeps its input and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """In the place of ``torch.nn.functional.rms_norm``."""
    result: Tensor = FusedRmsNorm.apply(x, weight)  # type: ignore[assignment]
    return result


def attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """In the place of ``scaled_dot_product_attention``: keeps its output and a float32 per query
    and head (Dao et al. 2022), with or without a mask."""
    if value.shape[-1] != query.shape[-1]:
        narrow: Tensor = _NarrowValues.apply(query, key, value)  # type: ignore[assignment]
        return narrow
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return result


def varlen_attention(original: Any) -> Any:
    """In the place of ``varlen_attn``, whose result is as wide as a query: values may be narrower.

    Args:
        original: ``torch.nn.attention.varlen.varlen_attn``.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        if value.shape[-1] == query.shape[-1]:
            return original(query, key, value, *args, **named)  # type: ignore[no-any-return]
        narrow: Tensor = _NarrowValues.apply(query, key, value)  # type: ignore[assignment]
        return narrow

    return attend


class _NarrowValues(torch.autograd.Function):
    """Attention that keeps its inputs, its output and a float32 per query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
