"""Log-probabilities and entropy from vocabulary-parallel logits.

Each tensor rank holds the logits of its own slice of the vocabulary. What crosses ranks is three
numbers per token, never the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    ) -> tuple[Tensor, Tensor]:
        log_z = torch.empty(rows.numel(), dtype=torch.float32, device=logits.device)
        entropy, log_probs = torch.empty_like(log_z), torch.empty_like(log_z)
        local = targets - vocab_start
        mine = (local >= 0) & (local < num_valid)
        for chunk in torch.arange(rows.numel(), device=rows.device).split(ROWS_PER_CHUNK):
            x = _tempered(logits, rows[chunk], num_valid, temperature)
            top = x.amax(1) if num_valid else x.new_full((chunk.numel(),), -torch.inf)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shifted = x - top[:, None]
            exp = shifted.exp()
            safe = local[chunk].clamp(0, max(num_valid - 1, 0))
            picked = shifted.gather(1, safe[:, None]).squeeze(1) if num_valid else top
            target = torch.where(mine[chunk], picked, torch.zeros_like(top))
            sums = torch.stack([exp.sum(1), (exp * shifted).sum(1), target])
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
        for chunk in torch.arange(rows.numel(), device=rows.device).split(ROWS_PER_CHUNK):
            x = _tempered(logits, rows[chunk], ctx.num_valid, ctx.temperature)
            log_p = x - log_z[chunk][:, None]
            p = log_p.exp()
            # d log p_y / d x_j = [j = y] - p_j ;  d H / d x_j = -p_j (log p_j + H)
            g = -grad_log_probs[chunk][:, None] * p
            if grad_entropy is not None:
                g -= grad_entropy[chunk][:, None] * p * (log_p + entropy[chunk][:, None])
            where = mine[chunk].nonzero().squeeze(1)
            g[where, local[chunk][where]] += grad_log_probs[chunk][where]
            out[rows[chunk], : ctx.num_valid] = (g / ctx.temperature).to(out.dtype)
        return out, None, None, None, None, None, None


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

    Returns:
        Log-probabilities ``[r]`` and entropies ``[r]`` in nats, float32, equal on all ranks.
    """
    slice_size = logits.size(1)
    start = rank * slice_size
    num_valid = max(0, min(slice_size, vocab_size - start))
    result: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[assignment]
        logits, rows, targets, temperature, start, num_valid, group
    )
    return result
