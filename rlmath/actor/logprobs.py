"""Log-probabilities and entropy from vocabulary-parallel logits.

Each tensor rank has the logits of a slice of the vocabulary. Ranks exchange three numbers per
token, never logits. Nothing here makes the host wait for the GPU.

:class:`VocabSlice` has the arithmetic for some rows; this module applies it to whole logits,
``head.py`` to one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RowSum = Callable[[Tensor], Tensor]

# Rows whose softmax is in float32 at once; bounds the extra memory to rows x slice x 4 bytes.
ROWS_PER_CHUNK = 2048


@dataclass(frozen=True)
class Distribution:
    """``softmax(logits / temperature)`` over the real vocabulary, sharded over tensor ranks.

    Rows that pad the vocabulary to a multiple of the tensor ranks are excluded.
    """

    temperature: float  # Sampling temperature, above 0.
    vocab_size: int  # Real size of the whole vocabulary.
    rank: int = 0  # This process's rank in group.
    # Tensor-parallel ranks; None if one rank has the whole vocabulary.
    group: dist.ProcessGroup | None = None
    # Sum a row in an order that does not depend on other rows; on CUDA, with Megatron's
    # batch-invariant mode.
    batch_invariant: bool = False

    def slice(self, size: int) -> VocabSlice:
        """This rank's slice; ``size`` includes padding."""
        start = self.rank * size
        return VocabSlice(
            start=start,
            num_valid=max(0, min(size, self.vocab_size - start)),
            temperature=self.temperature,
            group=self.group,
            row_sum=_batch_invariant_sum if self.batch_invariant else _sum,
        )


@dataclass(frozen=True)
class VocabSlice:
    """A rank's slice of the vocabulary (see :class:`Distribution`), and its arithmetic."""

    start: int  # First entry of the slice.
    num_valid: int  # Number of entries that are not padding; the first ones.
    temperature: float  # Sampling temperature.
    # Tensor-parallel ranks; None if one rank has the whole vocabulary.
    group: dist.ProcessGroup | None
    row_sum: RowSum  # Sums rows [n, v] to [n].

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``[r]`` each: indices of targets in the slice, and whether they are in it."""
        local = targets - self.start
        return local, (local >= 0) & (local < self.num_valid)

    def apply_temperature(self, logits: Tensor) -> Tensor:
        """Logits ``[n, num_valid]`` at the temperature, in float32 at least, in a new tensor."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if logits.dtype == dtype:
            return logits / self.temperature
        return logits.to(dtype).div_(self.temperature)

    def statistics(self, x: Tensor, local: Tensor, mine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log Z, the target's log-prob and the entropy of rows over all slices, ``[n]`` each.

        Args:
            x: ``[n, num_valid]`` from :meth:`apply_temperature`; overwritten.
            local: ``[n]`` from :meth:`places`.
            mine: ``[n]`` from :meth:`places`.
        """
        top = x.amax(1) if self.num_valid else x.new_full((x.size(0),), -torch.inf)
        if self.group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        shifted = x.sub_(top[:, None])
        safe = local.clamp(0, max(self.num_valid - 1, 0))
        picked = shifted.gather(1, safe[:, None]).squeeze(1) if self.num_valid else top
        target = torch.where(mine, picked, torch.zeros_like(top))
        exp = shifted.exp()
        total = self.row_sum(exp)
        return self.over_slices(top, total, self.row_sum(exp.mul_(shifted)), target)

    def over_slices(
        self, top: Tensor, total: Tensor, weighted: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log Z, the target's log-prob and the entropy from sums over this slice, ``[n]`` each.

        Args:
            top: ``[n]``, the maximum ``x`` of all slices.
            total: ``[n]``, sum of ``exp(x - top)`` over this slice.
            weighted: ``[n]``, sum of ``(x - top) exp(x - top)``.
            target: ``[n]``, the target's ``x - top``; 0 where another slice has it.
        """
        sums = torch.stack([total, weighted, target])
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        log_sum = sums[0].log()
        return top + log_sum, sums[2] - log_sum, log_sum - sums[1] / sums[0]

    def gradient(
        self,
        x: Tensor,
        log_z: Tensor,
        entropy: Tensor,
        local: Tensor,
        mine: Tensor,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Gradient ``[n, num_valid]`` of the slice's logits, before the temperature.

        Args:
            x: ``[n, num_valid]`` from :meth:`apply_temperature`; overwritten.
            log_z: ``[n]`` from :meth:`statistics`, like ``entropy``.
            entropy: ``[n]``.
            local: ``[n]`` from :meth:`places`, like ``mine``.
            mine: ``[n]``.
            grad_log_probs: ``[n]``.
            grad_entropy: ``[n]``; ``None``: 0.
        """
        log_p = x.sub_(log_z[:, None])
        p = log_p.exp()
        # d log p_y / d x_j = [j = y] - p_j ;  d H / d x_j = -p_j (log p_j + H)
        if grad_entropy is None:
            g = p.mul_(-grad_log_probs[:, None])
        else:
            of_entropy = (grad_entropy[:, None] * p).mul_(log_p.add_(entropy[:, None]))
            g = p.mul_(-grad_log_probs[:, None]).sub_(of_entropy)
        if self.num_valid:
            # Every row has at most one target, so each entry is written once. Rows whose target is
            # on another rank add 0 somewhere: to exclude them, the host would have to know their
            # number, and wait for the GPU.
            place = local.clamp(0, self.num_valid - 1)[:, None]
            grad = torch.where(mine, grad_log_probs, 0.0)
            g.scatter_(1, place, g.gather(1, place) + grad[:, None])
        return g.div_(self.temperature)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, vocab: VocabSlice
    ) -> tuple[Tensor, Tensor]:
        log_z = torch.empty(rows.numel(), dtype=torch.float32, device=logits.device)
        entropy, log_probs = torch.empty_like(log_z), torch.empty_like(log_z)
        local, mine = vocab.places(targets)
        for chunk in _chunks(rows):
            log_z[chunk], log_probs[chunk], entropy[chunk] = vocab.statistics(
                vocab.apply_temperature(logits[rows[chunk], : vocab.num_valid]),
                local[chunk],
                mine[chunk],
            )
        ctx.save_for_backward(logits, rows, local, mine, log_z, entropy)
        ctx.vocab = vocab
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_log_probs, grad_entropy = grads
        logits, rows, local, mine, log_z, entropy = ctx.saved_tensors
        vocab: VocabSlice = ctx.vocab
        out = torch.zeros_like(logits)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        for chunk in _chunks(rows):
            out[rows[chunk], : vocab.num_valid] = vocab.gradient(
                vocab.apply_temperature(logits[rows[chunk], : vocab.num_valid]),
                log_z[chunk],
                entropy[chunk],
                local[chunk],
                mine[chunk],
                grad_log_probs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            ).to(out.dtype)
        return out, *[None] * 3


def _chunks(rows: Tensor) -> Iterator[slice]:
    for start in range(0, rows.numel(), ROWS_PER_CHUNK):
        yield slice(start, start + ROWS_PER_CHUNK)


def _sum(x: Tensor) -> Tensor:
    return x.sum(1)


def _batch_invariant_sum(x: Tensor) -> Tensor:
    """Sum as mean times size, because Megatron's batch-invariant mode has a kernel for the mean.

    torch's sum adds a row in an order that depends on the number of rows.
    """
    return x.mean(1) * x.size(1) if x.size(1) else x.sum(1)


def vocab_parallel_log_probs(
    logits: Tensor, rows: Tensor, targets: Tensor, distribution: Distribution
) -> tuple[Tensor, Tensor]:
    """Log-probs of given tokens, and the entropy. Both results are differentiable. Returns
    log-probabilities ``[r]`` and entropies ``[r]`` in nats, float32, equal on all ranks.

    Args:
        logits: ``[t, v]``, this rank's slice of the vocabulary.
        rows: ``[r]`` int64, positions to compute; no duplicates.
        targets: ``[r]`` int64, the token at each position.
        distribution: The distribution that the logits represent.
    """
    result: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(  # type: ignore[assignment]
        logits, rows, targets, distribution.slice(logits.size(1))
    )
    return result
