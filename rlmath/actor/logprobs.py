"""Log-probabilities and entropy from vocabulary-parallel logits.

Each tensor rank holds the logits of its own slice of the vocabulary. What crosses ranks is three
numbers per token, never the logits. Nothing here makes the host wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RowSum = Callable[[Tensor], Tensor]

# Rows whose softmax is held in float32 at once; bounds the extra memory to rows x slice x 4 bytes.
ROWS_PER_CHUNK = 2048


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_start: int,
        num_valid: int,
        group: dist.ProcessGroup | None,
        row_sum: RowSum,
    ) -> tuple[Tensor, Tensor]:
        log_z = torch.empty(rows.numel(), dtype=torch.float32, device=logits.device)
        entropy, log_probs = torch.empty_like(log_z), torch.empty_like(log_z)
        local = targets - vocab_start
        mine = (local >= 0) & (local < num_valid)
        for chunk in _chunks(rows):
            x = _tempered(logits, rows[chunk], num_valid, temperature)
            top = x.amax(1) if num_valid else x.new_full((x.size(0),), -torch.inf)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shifted = x - top[:, None]
            exp = shifted.exp()
            safe = local[chunk].clamp(0, max(num_valid - 1, 0))
            picked = shifted.gather(1, safe[:, None]).squeeze(1) if num_valid else top
            target = torch.where(mine[chunk], picked, torch.zeros_like(top))
            sums = torch.stack([row_sum(exp), row_sum(exp * shifted), target])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_z[chunk] = top + log_sum
            log_probs[chunk] = sums[2] - log_sum
            entropy[chunk] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, rows, local, mine, log_z, entropy)
        ctx.temperature, ctx.num_valid = temperature, num_valid
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_log_probs, grad_entropy = grads
        logits, rows, local, mine, log_z, entropy = ctx.saved_tensors
        out = torch.zeros_like(logits)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        for chunk in _chunks(rows):
            x = _tempered(logits, rows[chunk], ctx.num_valid, ctx.temperature)
            log_p = x - log_z[chunk][:, None]
            p = log_p.exp()
            # d log p_y / d x_j = [j = y] - p_j ;  d H / d x_j = -p_j (log p_j + H)
            g = -grad_log_probs[chunk][:, None] * p
            if grad_entropy is not None:
                g -= grad_entropy[chunk][:, None] * p * (log_p + entropy[chunk][:, None])
            if ctx.num_valid:
                # Every row has one target at most, so each place is written once. Rows whose
                # target is another rank's add 0 to some place: to leave them out, the host would
                # have to know how many there are, and wait for the GPU.
                place = local[chunk].clamp(0, ctx.num_valid - 1)[:, None]
                grad = torch.where(mine[chunk], grad_log_probs[chunk], 0.0)
                g.scatter_(1, place, g.gather(1, place) + grad[:, None])
            out[rows[chunk], : ctx.num_valid] = (g / ctx.temperature).to(out.dtype)
        return out, *[None] * 7


def _chunks(rows: Tensor) -> Iterator[slice]:
    for start in range(0, rows.numel(), ROWS_PER_CHUNK):
        yield slice(start, start + ROWS_PER_CHUNK)


def _sum(x: Tensor) -> Tensor:
    return x.sum(1)


def _batch_invariant_sum(x: Tensor) -> Tensor:
    """By way of the mean, for which Megatron's batch-invariant mode has a kernel.

    torch's sum adds a row up in an order that depends on how many rows there are.
    """
    return x.mean(1) * x.size(1) if x.size(1) else x.sum(1)


def _tempered(logits: Tensor, rows: Tensor, num_valid: int, temperature: float) -> Tensor:
    return logits[rows, :num_valid].float() / temperature


def vocab_parallel_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of given tokens, and the entropy, at the sampling temperature.

    The distribution is ``softmax(logits / temperature)`` over the real vocabulary: rows that pad
    it to a multiple of the tensor ranks take no part. Differentiable in both results.

    Args:
        logits: ``[t, v]``, this rank's slice of the vocabulary.
        rows: ``[r]`` int64, which positions are wanted; no position twice.
        targets: ``[r]`` int64, the token whose log-probability is wanted at each.
        temperature: Of sampling, above 0.
        vocab_size: Real size of the whole vocabulary.
        rank: This rank's place in ``group``.
        group: Tensor-parallel ranks; ``None`` when one rank has the whole vocabulary.
        batch_invariant: Add up a row in an order that other rows do not change; on CUDA, under
            Megatron's batch-invariant mode.

    Returns:
        Log-probabilities ``[r]`` and entropies ``[r]`` in nats, float32, equal on all ranks.
    """
    slice_size = logits.size(1)
    start = rank * slice_size
    num_valid = max(0, min(slice_size, vocab_size - start))
    result: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[assignment]
        logits,
        rows,
        targets,
        temperature,
        start,
        num_valid,
        group,
        _batch_invariant_sum if batch_invariant else _sum,
    )
    return result
