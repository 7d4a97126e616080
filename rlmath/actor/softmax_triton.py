"""The softmax of a chunk of logits in two Triton kernels (``actor.logits=triton``).

``softmax_tables.py`` does the same with a dozen passes over float32 tables. Here forward reads the
logits once, with a running maximum (Milakov and Gimelshein, 2018, arXiv:1805.02867, extended by the
entropy's sum), and backward reads and writes them once. A row's result does not depend on other
rows. Imports Triton, so only where it is installed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from rlmath.actor.logprobs import VocabSlice

# Vocabulary entries that a program has in registers at once: 32 for each of 128 threads.
BLOCK = 4096


def statistics(
    vocab: VocabSlice, logits: Tensor, local: Tensor, mine: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`rlmath.actor.softmax_tables.statistics`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    top, total, weighted, target = logits.new_empty(4, len(logits), dtype=dtype)
    if len(logits):
        _statistics[(len(logits),)](
            logits,
            logits.stride(0),
            local,
            mine,
            vocab.temperature,
            vocab.num_valid,
            top,
            total,
            weighted,
            target,
            BLOCK=BLOCK,
            DTYPE=_OF[dtype],
        )
    if vocab.group is not None:
        own = top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=vocab.group)
        # The sums are relative to this slice's maximum. A slice of only padding has none.
        lower = torch.where(total > 0, own - top, 0.0)
        weighted = lower.exp() * (weighted + lower * total)
        total = lower.exp() * total
    return vocab.over_slices(top, total, weighted, torch.where(mine, target - top, 0.0))


def write_gradient(
    vocab: VocabSlice,
    logits: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    local: Tensor,
    mine: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """As :func:`rlmath.actor.softmax_tables.write_gradient`."""
    if not logits.numel():
        return
    _gradient[(len(logits), triton.cdiv(logits.size(1), BLOCK))](
        logits,
        logits.stride(0),
        log_z,
        entropy,
        local,
        mine,
        grad_log_probs.contiguous(),
        grad_log_probs if grad_entropy is None else grad_entropy.contiguous(),
        vocab.temperature,
        vocab.num_valid,
        logits.size(1),
        OF_ENTROPY=grad_entropy is not None,
        BLOCK=BLOCK,
        DTYPE=_OF[log_z.dtype],
    )


_OF = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    stride,
    local,
    mine,
    temperature,
    num_valid,
    tops,
    totals,
    weighteds,
    targets,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program per row: maximum, both sums relative to it, and the target's logit."""
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    top = tl.full((), float("-inf"), DTYPE)
    total = tl.full((), 0.0, DTYPE)
    weighted = tl.full((), 0.0, DTYPE)
    for start in range(0, num_valid, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < num_valid
        x = tl.load(start_of_row + column, mask=valid, other=float("-inf")).to(DTYPE) / temperature
        higher = tl.maximum(top, tl.max(x, 0))
        lower = tl.where(total > 0, top - higher, 0.0)
        shrink = tl.exp(lower)
        shifted = x - higher
        exp = tl.exp(shifted)
        about = tl.where(valid, shifted, 0.0)
        weighted = shrink * (weighted + lower * total) + tl.sum(about * exp, 0)
        total = shrink * total + tl.sum(exp, 0)
        top = higher
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(weighteds + row, weighted)
    held = tl.load(mine + row)
    place = tl.load(local + row)
    tl.store(
        targets + row, tl.load(start_of_row + place, mask=held, other=0.0).to(DTYPE) / temperature
    )


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    stride,
    log_zs,
    entropies,
    local,
    mine,
    grads_log_prob,
    grads_entropy,
    temperature,
    num_valid,
    width,
    OF_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One program per row and block of the vocabulary."""
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grads_log_prob + row)
    x = tl.load(start_of_row + column, mask=column < width, other=0.0).to(DTYPE) / temperature
    log_p = x - tl.load(log_zs + row)
    p = tl.exp(log_p)
    # d log p_y / d x_j = [j = y] - p_j ;  d H / d x_j = -p_j (log p_j + H)
    g = -grad * p
    if OF_ENTROPY:
        g -= tl.load(grads_entropy + row) * p * (log_p + tl.load(entropies + row))
    is_target = (column == tl.load(local + row)) & tl.load(mine + row)
    g = tl.where(is_target, g + grad, g) / temperature
    g = tl.where(column < num_valid, g, 0.0)
    tl.store(start_of_row + column, g.to(logits.dtype.element_ty), mask=column < width)
