"""Shard the sequences of a minibatch over data-parallel ranks and pack them into micro-batches.

Invariants of ``assign``:

- each sequence is in exactly one micro-batch;
- every rank has the same number of micro-batches, because pipeline schedules and gradient reduction
  wait for each other;
- a micro-batch has at most ``max_tokens_per_microbatch`` tokens, or one sequence alone;
- no micro-batch is empty, unless there are fewer sequences than micro-batches;
- the same lengths give the same result, on every rank and machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from rlmath.types import MicroBatch

# A layer's matrices cost about 24 h^2 operations per token, causal attention about 2 h l: equal at
# l = 12 h, about 18 thousand tokens at the hidden size 1536 of a 1.5B model.
ATTENTION_BREAK_EVEN_TOKENS = 18432


def cost(length: int, attention_break_even_tokens: float = ATTENTION_BREAK_EVEN_TOKENS) -> float:
    """Relative cost of a sequence: linear in its tokens, plus quadratic for attention.

    ``length + length^2 / attention_break_even_tokens``: at the break-even length attention costs
    as much as all matrices together.
    """
    return length + length * length / attention_break_even_tokens


def assign(
    lengths: Sequence[int],
    data_parallel: int,
    max_tokens_per_microbatch: int,
    *,
    multiple_of: int = 1,
    attention_break_even_tokens: float = ATTENTION_BREAK_EVEN_TOKENS,
    costs: Sequence[float] | None = None,
) -> list[list[MicroBatch]]:
    """Shard sequences over ranks by cost, and pack each rank's share within a token budget.

    Ranks are balanced first (the most expensive sequence goes to the rank with the lowest cost so
    far), because they wait for each other once per minibatch. Each share is then packed into as
    many micro-batches as the neediest rank requires, of about equal tokens. A sequence over the
    budget forms its own micro-batch. A rank's most expensive micro-batch runs first, so an
    out-of-memory error appears immediately.

    With fewer sequences than ``ranks x micro-batches`` (a few sequences near or over the budget),
    some micro-batches at the end of a rank's list are empty: for them the caller runs a padding
    token through the model, with weight 0.

    Args:
        lengths: Length of each of the ``N`` sequences, prompt plus response, in tokens.
        data_parallel: Number of ranks.
        max_tokens_per_microbatch: Token budget.
        multiple_of: The number of micro-batches per rank is a multiple of this (the number of
            stages, for an interleaved pipeline schedule).
        attention_break_even_tokens: As in ``cost``.
        costs: Cost of each sequence; ``None``: computed by ``cost``.

    Returns:
        Micro-batches of each rank; their ``sequences`` are indices into ``lengths``.

    Raises:
        ValueError: Fewer sequences than ranks, a length below 1, or a number below 1.
    """
    _check(lengths, data_parallel, max_tokens_per_microbatch, multiple_of)
    if costs is None:
        costs = [cost(length, attention_break_even_tokens) for length in lengths]
    shares = _balance(costs, data_parallel)
    count = 0
    # Moving sequences between shares can, in rare cases, require one more micro-batch.
    while True:
        needed = max(len(_best_fit(share, lengths, max_tokens_per_microbatch)) for share in shares)
        needed = -(-needed // multiple_of) * multiple_of
        if needed <= count:
            break
        count = needed
        _level_counts(shares, costs, count)

    ranks = []
    for share in shares:
        bins = _pack(share, lengths, max_tokens_per_microbatch, count)
        bins.sort(key=lambda b: (-sum(costs[i] for i in b), b))
        ranks.append([MicroBatch(tuple(b), sum(lengths[i] for i in b)) for b in bins])
    return ranks


def join_micro_batches(
    ranks: Sequence[Sequence[MicroBatch]], max_tokens: int, multiple_of: int = 1
) -> list[tuple[int, ...]]:
    """Join consecutive micro-batches within a larger budget, into as many on every rank.

    Args:
        ranks: Micro-batches of each rank, as many on every rank.
        max_tokens: Token budget; a micro-batch above it stays alone.
        multiple_of: As in ``assign``.

    Returns:
        For each rank, the number of sequences in each of its joined micro-batches.
    """
    joined = [_runs(rank, max_tokens) for rank in ranks]
    count = -(-max(map(len, joined), default=0) // multiple_of) * multiple_of
    for runs in joined:
        while len(runs) < count:
            place = max(range(len(runs)), key=lambda i: len(runs[i]))
            half = (len(runs[place]) + 1) // 2
            runs[place : place + 1] = [runs[place][:half], runs[place][half:]]
    return [tuple(sum(len(one.sequences) for one in run) for run in runs) for runs in joined]


def _runs(micro_batches: Sequence[MicroBatch], budget: int) -> list[Sequence[MicroBatch]]:
    runs: list[Sequence[MicroBatch]] = []
    start = tokens = 0
    for end, one in enumerate(micro_batches):
        if end > start and tokens + one.num_tokens > budget:
            runs.append(micro_batches[start:end])
            start, tokens = end, 0
        tokens += one.num_tokens
    return [*runs, micro_batches[start:]] if micro_batches else runs


def _check(
    lengths: Sequence[int], data_parallel: int, max_tokens_per_microbatch: int, multiple_of: int
) -> None:
    for name, value in (
        ("data_parallel", data_parallel),
        ("max_tokens_per_microbatch", max_tokens_per_microbatch),
        ("multiple_of", multiple_of),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}: at least 1 is needed")
    if len(lengths) < data_parallel:
        raise ValueError(
            f"{len(lengths)} sequences in a minibatch cannot be split over data_parallel = "
            f"{data_parallel} ranks: {data_parallel - len(lengths)} of them would have nothing to "
            f"do; use more prompts or samples per step, fewer minibatches_per_step, or "
            f"data_parallel <= {len(lengths)}"
        )
    shortest = min(lengths)
    if shortest < 1:
        raise ValueError(f"sequence {list(lengths).index(shortest)} has {shortest} tokens")


def _balance(costs: Sequence[float], data_parallel: int) -> list[list[int]]:
    """Longest processing time first: most expensive sequence first, to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(data_parallel)]
    load = [(0.0, rank) for rank in range(data_parallel)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = load[0]
        shares[rank].append(index)
        heapq.heapreplace(load, (total + costs[index], rank))
    return shares


def _level_counts(shares: list[list[int]], costs: Sequence[float], count: int) -> None:
    """Move inexpensive sequences until each share has ``count``, or none has more to give.

    A share with fewer sequences than micro-batches holds each alone, so it can always take one
    more. Shares are sorted by decreasing cost, so the last sequence is the least expensive.
    """
    total = [sum(costs[i] for i in share) for share in shares]
    for share in shares:
        while len(share) < count:
            rich = [r for r, s in enumerate(shares) if len(s) > count]
            if not rich:
                return
            giver = max(rich, key=lambda r: total[r])
            total[giver] -= costs[shares[giver][-1]]
            share.append(shares[giver].pop())


def _best_fit(share: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit decreasing: each sequence, longest first, into the fullest bin with room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in sorted(share, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(room, (length, -1))
        if at < len(room):
            left, chosen = room.pop(at)
            bins[chosen].append(index)
        else:
            left, chosen = max(budget, length), len(bins)
            bins.append([index])
        if left > length:
            insort(room, (left - length, chosen))
    return bins


def _pack(share: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Exactly ``count`` bins within the budget, of about equal tokens if possible."""
    bins = _even(share, lengths, budget, count)
    if bins is None:
        bins = _best_fit(share, lengths, budget)
        _split_to(bins, lengths, count)
    for b in bins:
        b.sort()
    return bins


def _even(
    share: Sequence[int], lengths: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    """Each sequence, longest first, into the bin with fewest tokens; ``None`` if over budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [(0, b) for b in range(count)]
    for index in sorted(share, key=lambda i: (-lengths[i], i)):
        tokens, chosen = load[0]
        # The emptiest bin has no room, so no other has.
        if tokens and tokens + lengths[index] > budget:
            return None
        bins[chosen].append(index)
        heapq.heapreplace(load, (tokens + lengths[index], chosen))
    return bins


def _split_to(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Halve the fullest bins with several sequences until there are ``count`` bins."""
    while len(bins) < count:
        several = [b for b in bins if len(b) > 1]
        if not several:
            bins.extend([] for _ in range(count - len(bins)))
            return
        fullest = max(several, key=lambda b: sum(lengths[i] for i in b))
        # Alternate by length, so both halves have about the same tokens.
        fullest.sort(key=lambda i: (-lengths[i], i))
        bins.append(fullest[1::2])
        fullest[:] = fullest[0::2]
