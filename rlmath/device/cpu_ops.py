"""Operators of a transformer layer with fewer passes over memory than autograd's.

On a CPU the layers of small models are bound by memory: torch computes RMSNorm, the gated
activation and rotary embeddings, forward and backward, in some thirty passes, these operators in
about half as many.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The mean square in float32 also for bfloat16, as engines and transformers have it: rounded
        # to 8 bits it would scale the whole row.
        wide = x if x.dtype.itemsize >= 4 else x.float()
        mean_square = torch.linalg.vecdot(wide, wide, dim=-1) / x.size(-1)
        inverse = (mean_square + eps).rsqrt_().unsqueeze(-1)
        normed = (wide * inverse).to(x.dtype)
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
        # In place, which multiplies in float32 and rounds once as well.
        return torch.addcmul(scaled, normed, projection, value=-1).mul_(inverse), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv:1910.07467, eq. 4).
    ``x``: ``[..., d]``; weight: ``[d]``."""
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
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return out


# Longest rows for which bfloat16 attention is computed in float32.
_MAX_WIDENED_TOKENS = 256


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention, causal unless a mask says otherwise.

    torch's bfloat16 backward kernel sets up a whole product for each block of a few rows: at 90
    tokens it takes twice as long as the float32 kernel with its copies, at 256 as long. Returns
    ``[n, heads, l, e]``.

    Args:
        query: ``[n, heads, l, d]``; key: ``[n, kv_heads, l, d]``; value: ``[n, kv_heads, l, e]``.
        mask: ``[l, l]`` or ``[n, 1, l, l]`` bool, true where a query sees a key.
    """
    dtype = query.dtype
    if dtype == torch.bfloat16 and key.size(2) <= _MAX_WIDENED_TOKENS:
        query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    ).to(dtype)


def swiglu(x: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202, eq. 6) of ``x = [gate, up]``; takes the place of
    Megatron's ``bias_swiglu_impl`` and its arguments. ``x``: ``[..., 2 d]``; bias: ``[2 d]`` or
    ``None``. Returns ``[..., d]``."""
    result: Tensor = _SwiGLU.apply(x if bias is None else x + bias)  # type: ignore[assignment]
    return result


def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *_: Any) -> Tensor:
    """``swiglu`` times a router's weight for each token, in the type of ``x``; takes the place of
    Megatron's ``weighted_bias_swiglu_impl``. ``x``: ``[t, 2 d]``; bias: ``[2 d]`` or ``None``;
    weights: ``[t, 1]``. Returns ``[t, d]``."""
    return (swiglu(x, bias) * weights).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The inverse of a rotation is the one by the opposite angle.
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    turning = cos.size(-1)
    half = turning // 2
    swapped = torch.cat((x[..., half:turning], x[..., :half]), -1)
    out = torch.mul(x[..., :turning], cos).addcmul_(swapped, sin, value=direction)
    return out if turning == x.size(-1) else torch.cat((out, x[..., turning:]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv:2104.09864, eq. 34) of packed tokens, halves of a head as the pairs.

    Args:
        x: ``[t, heads, dim]``.
        cos: ``[t, 1, 2 * half]``, of each token's angles, twice; dimensions of ``x`` from
            ``2 * half`` on are unchanged.
        sin: The same, negative in the first half.
    """
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[assignment]
    return result


class PackedRotary:
    """A replacement for Megatron's ``apply_rotary_pos_emb`` on packed sequences.

    Megatron splits the row by sequence and recomputes cosines and sines for the queries and keys of
    each layer. All layers share the same angles, so they are computed once per micro-batch here.
    ``otherwise``: Megatron's own function, for anything but the plain packed case.
    """

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise
        # For the latest micro-batch: the inputs of the cached values, and the values. The tensors
        # are kept so that no other one can take their identity.
        self._freqs: Tensor | None = None
        self._ends: Tensor | None = None
        self._rest: tuple[float, torch.dtype] = (1.0, torch.float32)
        self._cos_sin: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def __call__(
        self,
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        """Rotate packed tokens, as Megatron's function does.

        Args:
            t: ``[t, heads, dim]``.
            freqs: ``[longest, 1, 1, 2 * half]``.
            cu_seqlens: ``[n + 1]``, or ``[2, n + 1]`` where sequences begin within rows of others:
                the second row has the position of each sequence's first own token.
        """
        plain = not (config.rotary_interleaved or config.multi_latent_attention)
        if cu_seqlens is None or not plain or config.context_parallel_size > 1:
            return self._otherwise(t, freqs, config, cu_seqlens, mscale, cp_group)  # type: ignore[no-any-return]
        same = self._freqs is freqs and self._ends is cu_seqlens
        if not same or self._rest != (mscale, t.dtype):
            self._freqs, self._ends, self._rest = freqs, cu_seqlens, (mscale, t.dtype)
            self._cos_sin = _cos_sin(freqs, cu_seqlens, mscale, t.dtype)
        return rotate(t, *self._cos_sin)


def _cos_sin(
    freqs: Tensor, cu_seqlens: Tensor, mscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``rotate``; position ``p`` of a sequence has angles ``freqs[p]``."""
    ends, *firsts = cu_seqlens.long().unbind() if cu_seqlens.dim() == 2 else [cu_seqlens.long()]
    # Difference between a token's place in the row and its position.
    before = ends[:-1] - (firsts[0][:-1] if firsts else 0)
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(before, ends.diff())
    # Both halves of the last dimension hold the same angles.
    angles = freqs[:, 0]
    cos, sin = (angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype)
    sin[..., : sin.size(-1) // 2].neg_()
    return cos[positions], sin[positions]
