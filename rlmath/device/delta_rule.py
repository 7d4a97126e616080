"""Operators of a gated delta net (GDN; Yang et al. 2024, arXiv:2412.06464).

On a GPU with flash-linear-attention (``fla``) its Triton kernels, which take packed sequences; else
torch's operators, which take sequences of one length.
"""

from __future__ import annotations

import functools
import warnings
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a chunk, between whose states the recurrence runs, as in transformers and fla.
CHUNK = 64
# Added to the squared norm of a query or key, as in transformers and fla.
_EPS = 1e-6


def takes_packs(x: Tensor) -> bool:
    """Whether the operators take packed sequences of this tensor's device."""
    return x.is_cuda and _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    # The module is there since 0.6. Before 0.5 value heads could not share key heads.
    found = find_spec("fla") and find_spec("fla.modules.causal_conv1d")
    if not found:
        warnings.warn(
            "linear attention is computed by torch's operators, which are slower and need more "
            "memory than its kernels; pip install 'flash-linear-attention>=0.6'",
            stacklevel=2,
        )
    return bool(found)


def causal_convolution(x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
    """SiLU of a convolution of each channel over its last tokens.

    Args:
        x: ``[n, l, channels]``; weight: ``[channels, 1, width]``.
        ends: ``[sequences + 1]`` int32, boundaries of packed sequences, with ``n`` 1; only where
            :func:`takes_packs`.
    """
    if ends is not None:
        from fla.modules.causal_conv1d import causal_conv1d

        out: Tensor
        out, _ = causal_conv1d(x, weight.squeeze(1), activation="silu", cu_seqlens=ends)
        return out
    padded = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
    return F.silu(F.conv1d(padded, weight, groups=weight.size(0))).transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    ends: Tensor | None = None,
) -> Tensor:
    """Outputs of the recurrence over a sequence's tokens, from a state of zeros.

    The state of a value head is ``S = exp(decay) (1 - beta k k^T) S + beta k v^T``, and the output
    is ``S^T q`` with normalized queries and keys (arXiv:2412.06464, equation 10).

    Args:
        query: ``[n, l, key_heads, key_dim]``, as ``key``; value: ``[n, l, heads, value_dim]``,
            whose neighbors share a key head.
        decay: ``[n, l, heads]`` float32, at most 0; beta: ``[n, l, heads]``.
        ends: As for :func:`causal_convolution`.

    Returns:
        ``[n, l, heads, value_dim]``.
    """
    if ends is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        out: Tensor
        out, _ = chunk_gated_delta_rule(
            query, key, value, decay, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends
        )
        return out
    length, sharing = value.size(1), value.size(2) // key.size(2)
    chunk = min(CHUNK, length)

    def in_chunks(x: Tensor) -> Tensor:
        """``[n, heads, chunks, chunk, ...]`` float32, padded with zeros, which change no state."""
        x = x.float().transpose(1, 2)
        x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, -length % chunk))
        return x.unflatten(2, (-1, chunk))

    query, key = (_normalize(x.float()).repeat_interleave(sharing, 2) for x in (query, key))
    chunks = map(in_chunks, (query * query.size(-1) ** -0.5, key, value, decay, beta[..., None]))
    return _over_chunks(*chunks)[:, :, :length].transpose(1, 2).to(value.dtype)


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _over_chunks(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """``[n, heads, tokens, value_dim]`` of ``[n, heads, chunks, chunk, ...]`` (section 3.3)."""
    total = decay.cumsum(-1)
    later = torch.ones(query.size(3), query.size(3), dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    # A chunk's tokens write to the state by a triangular system, because each subtracts what those
    # before it wrote under its key. Without and with the state before the chunk.
    system = (key * beta) @ key.mT * between
    from_start = total.exp()[..., None]
    wanted = torch.cat([value * beta, key * beta * from_start], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, forgotten = solved.split([value.size(-1), key.size(-1)], -1)
    within = query @ key.mT * between
    query = query * from_start
    key = key * (total[..., -1:] - total).exp()[..., None]
    state, outputs = key.new_zeros(*key.shape[:2], key.size(-1), value.size(-1)), []
    for n in range(query.size(2)):
        new = written[:, :, n] - forgotten[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + within[:, :, n] @ new)
        state = state * from_start[:, :, n, -1:] + key[:, :, n].mT @ new
    return torch.cat(outputs, 2)
