"""Context parallelism: the ranks that share the tokens of each sequence.

A sequence, padded to a multiple of ``2 C`` tokens for ``C`` context ranks, is split into ``2 C``
pieces; rank ``c`` has the pieces ``c`` and ``2 C - 1 - c``, so all ranks have equal parts of causal
attention's triangle. Megatron's rotary embedding and Transformer Engine's attention split the same
way. The loss's inputs (log-probs, entropies, values) are all-gathered on every context rank: losses
see whole sequences, and each rank propagates the gradient only through its own tokens, so the sum
over ranks is the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextShare:
    """Distribution of the values of a pack's ``r`` response tokens over context ranks."""

    largest: int  # Maximum number of values on a rank; all ranks send as many.
    order: Tensor  # [r] int64, index of each value in the ranks' [C * largest].
    first: int  # Index of this rank's first value there.

    def to(self, device: torch.device) -> ContextShare:
        return dataclasses.replace(self, order=self.order.to(device))


@dataclass(frozen=True)
class ContextClass:
    """Sequences of one padded length ``l`` in the attention of one context rank."""

    queries: Tensor  # [n, l / C] int64, indices of this rank's tokens in its own row.
    # [n, l] int64, indices of all tokens of the sequences in the ranks' concatenated rows, in text
    # order.
    keys: Tensor
    mask: Tensor  # [l / C, l] bool, keys visible to a query.

    def to(self, device: torch.device) -> ContextClass:
        return ContextClass(self.queries.to(device), self.keys.to(device), self.mask.to(device))


def _owners(sizes: Sequence[int], contexts: int) -> tuple[Tensor, Tensor]:
    """``[t]`` each: the rank of each position of the whole row, and the index in that rank's
    row."""
    ranks, places = [], []
    start = 0
    for size in sizes:
        position = torch.arange(size)
        piece_size = size // (2 * contexts)
        piece = position // piece_size
        second = piece >= contexts
        ranks.append(torch.where(second, 2 * contexts - 1 - piece, piece))
        places.append(start + second.long() * piece_size + position % piece_size)
        start += size // contexts
    return torch.cat(ranks), torch.cat(places)


def own_positions(sizes: Sequence[int], contexts: int, cp_rank: int) -> Tensor:
    """``[t / C]`` int64, the positions of the whole row that a rank has, in their order. ``sizes``:
    padded lengths of the row's sequences, in tokens."""
    return (_owners(sizes, contexts)[0] == cp_rank).nonzero().squeeze(1)


def context_share(
    sizes: Sequence[int], contexts: int, cp_rank: int, rows: Tensor
) -> tuple[ContextShare, Tensor, Tensor]:
    """Share out positions of the whole row. ``rows``: ``[r]`` int64, positions of the whole row,
    rising. Returns how to all-gather their values, which of them are this rank's, and where those
    stand in its own row."""
    ranks, places = _owners(sizes, contexts)
    owner = ranks[rows]
    counts = torch.bincount(owner, minlength=contexts)
    largest = int(counts.max()) if len(rows) else 0
    order = torch.zeros_like(rows)
    for rank in range(contexts):
        mine = owner == rank
        order[mine] = rank * largest + torch.arange(int(counts[rank]))
    chosen = (owner == cp_rank).nonzero().squeeze(1)
    return ContextShare(largest, order, cp_rank * largest), chosen, places[rows[chosen]]


def context_classes(sizes: Sequence[int], contexts: int, cp_rank: int) -> list[ContextClass]:
    """The sequences of a row by padded length, for the attention of one rank."""
    ranks, places = _owners(sizes, contexts)
    flat = ranks * (sum(sizes) // contexts) + places
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    classes = []
    for size in sorted(set(sizes), reverse=True):
        members = [i for i, other in enumerate(sizes) if other == size]
        here = own_positions([size], contexts, cp_rank)
        own = [starts[i] // contexts + torch.arange(size // contexts) for i in members]
        classes.append(
            ContextClass(
                queries=torch.stack(own),
                keys=torch.stack([flat[starts[i] : starts[i] + size] for i in members]),
                mask=here[:, None] >= torch.arange(size)[None, :],
            )
        )
    return classes


class _AllGather(torch.autograd.Function):
    """``[largest]`` of each rank to ``[C * largest]`` on all; the gradient is this rank's part.

    All ranks compute the same loss from it, so each keeps its own values' gradient.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any, first: int) -> Tensor:
        ctx.part = slice(first, first + mine.numel())
        out = mine.new_empty(group.size() * mine.numel())
        dist.all_gather_into_tensor(out, mine.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][ctx.part], None, None


def all_gather_context(values: Tensor, share: ContextShare | None) -> Tensor:
    """Values of all response tokens of a micro-batch, from each context rank's own. Returns
    ``[r]``, the same on all context ranks. ``values``: ``[own]`` float32. ``share``: the
    rank's share; ``None``: there is one context rank, and these are all."""
    if share is None or not share.largest:
        return values
    from megatron.core import parallel_state

    padded = torch.nn.functional.pad(values, (0, share.largest - values.numel()))
    group = parallel_state.get_context_parallel_group()
    gathered: Tensor = _AllGather.apply(padded, group, share.first)  # type: ignore[assignment]
    return gathered[share.order]
