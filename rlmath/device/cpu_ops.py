"""Two operators of a transformer layer with fewer passes over memory than autograd makes of them.

On a CPU the layers of small models are bound by memory: torch computes RMSNorm and the gated
activation, forward and backward, in some twenty passes, these do in about half of that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vecdot(x, x, dim=-1) / x.size(-1)
        inverse = (mean_square + eps).rsqrt_().unsqueeze(-1)
        normed = x * inverse
        ctx.save_for_backward(normed, weight, inverse)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        normed, weight, inverse = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        scaled = grad * weight
        # With n = x / rms: dx = (g w - n mean(g w n)) / rms.
        projection = torch.linalg.vecdot(scaled, normed, dim=-1).unsqueeze(-1) / normed.size(-1)
        return torch.addcmul(scaled, normed, projection, value=-1).mul_(inverse), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, eq. 4).

    Args:
        x: ``[..., d]``; weight: ``[d]``.
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[assignment]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(grad, silu, out=grad_up)
        # d silu(a) / da = s + silu(a) (1 - s) with s = sigmoid(a).
        slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
        torch.mul(grad, up, out=grad_gate)
        grad_gate.mul_(slope)
        return out


def swiglu(x: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202, eq. 6) of ``x = [gate, up]``; takes the place of
    Megatron's ``bias_swiglu_impl`` and its arguments.

    Args:
        x: ``[..., 2 d]``; bias: ``[2 d]`` or ``None``.

    Returns:
        ``[..., d]``.
    """
    result: Tensor = _SwiGLU.apply(x if bias is None else x + bias)  # type: ignore[assignment]
    return result
