"""Keep the sequences of a group together, so the actor computes their prompt once.

Sequences of a micro-batch with the same prompt share its tokens, except the last one, which each
keeps. ``assign_sharing`` has the invariants of ``assign`` (``packing.py``), with the tokens of a
micro-batch counted by ``GroupedSequences.tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlmath.batching.packing import assign, cost
from rlmath.types import MicroBatch

# Cost of a shared token, relative to a computed one, for a sequence that does not compute it:
# attention copies its key and value, and the query beside them.
_COPY_SHARE = 0.25
# Fixed cost of a micro-batch, in tokens.
_MICRO_BATCH_TOKENS = 64


@dataclass(frozen=True)
class GroupedSequences:
    """Sequences, some with the same prompt."""

    lengths: Sequence[int]  # [N], prompt plus response, in tokens.
    # [N]; sequences of a group with prompts of equal length have the same prompt. (If they differ
    # nevertheless, nothing is shared, and a micro-batch may exceed the budget.)
    group_ids: Sequence[int]
    prompt_lengths: Sequence[int]  # [N], in tokens.

    def tokens(self, sequences: Sequence[int]) -> int:
        """Tokens of a micro-batch of these sequences; a copied token counts as a quarter."""
        return sum(self.lengths[i] for i in sequences) - math.floor(self._saved_tokens(sequences))

    def cost(self, sequences: Sequence[int]) -> float:
        """Relative cost of a micro-batch of these sequences (see ``packing.cost``)."""
        return sum(cost(self.lengths[i]) for i in sequences) - self._saved_tokens(sequences)

    def by_prompt(self) -> list[list[int]]:
        """The sequences of each prompt, ordered by first sequence."""
        found: dict[tuple[int, int], list[int]] = {}
        for i, prompt in enumerate(zip(self.group_ids, self.prompt_lengths, strict=True)):
            found.setdefault(prompt, []).append(i)
        return list(found.values())

    def _saved_tokens(self, sequences: Sequence[int]) -> float:
        prompts = [(self.group_ids[i], self.prompt_lengths[i]) for i in sequences]
        copies = sum(length - 1 for _, length in prompts)
        copies -= sum(length - 1 for _, length in set(prompts))
        return (1 - _COPY_SHARE) * copies


def assign_sharing(
    sequences: GroupedSequences,
    data_parallel: int,
    max_tokens_per_microbatch: int,
    *,
    multiple_of: int = 1,
) -> list[list[MicroBatch]]:
    """Like ``assign``, with the sequences of a group in as few micro-batches as is efficient.

    Tries whole groups as units, then halves, quarters, and so on, down to single sequences, as
    without sharing. Chooses the split whose most expensive rank has the lowest cost: large units
    share more, small ones balance ranks better.

    Args:
        data_parallel: As in ``assign``, like the others.

    Returns:
        As ``assign``. Within a micro-batch, sequences with the same prompt are adjacent.

    Raises:
        ValueError: As ``assign``.
    """
    count = len(sequences.lengths)
    best: list[list[list[int]]] = []
    least = math.inf
    for units in _units(sequences, max_tokens_per_microbatch):
        is_last = len(units) == count
        if len(units) < data_parallel and not is_last:
            continue
        dealt = assign(
            [sequences.tokens(unit) for unit in units],
            data_parallel,
            max_tokens_per_microbatch,
            multiple_of=multiple_of,
            costs=[sequences.cost(unit) for unit in units],
        )
        ranks = [[[i for u in one.sequences for i in units[u]] for one in rank] for rank in dealt]
        has_empty = not all(one for rank in ranks for one in rank)
        if has_empty and not is_last and count >= data_parallel * len(ranks[0]):
            continue
        most = max(sum(map(sequences.cost, rank)) for rank in ranks)
        most += _MICRO_BATCH_TOKENS * len(ranks[0])
        if most < least:
            best, least = ranks, most
    order = [i for prompt in sequences.by_prompt() for i in prompt]
    places = {i: place for place, i in enumerate(order)}
    for rank in best:
        for one in rank:
            one.sort(key=places.__getitem__)
        rank.sort(key=lambda one: (-sequences.cost(one), one))
    lengths = sequences.lengths
    return [[MicroBatch(tuple(one), sum(lengths[i] for i in one)) for one in r] for r in best]


def _units(sequences: GroupedSequences, budget: int) -> Iterator[list[list[int]]]:
    """The sequences in ever smaller units within the budget, finally one each."""
    prompts = sequences.by_prompt()
    largest, pieces = max(map(len, prompts), default=0), 1
    while True:
        yield [
            unit
            for prompt in prompts
            for piece in _split(sequences, prompt, min(pieces, len(prompt)))
            for unit in _within(sequences, piece, budget)
        ]
        if pieces >= largest:
            return
        pieces *= 2


def _split(sequences: GroupedSequences, prompt: Sequence[int], pieces: int) -> list[list[int]]:
    # Alternate by length, so the pieces have about the same tokens.
    order = sorted(prompt, key=lambda i: (-sequences.lengths[i], i))
    return [order[piece::pieces] for piece in range(pieces)]


def _within(sequences: GroupedSequences, unit: list[int], budget: int) -> Iterator[list[int]]:
    if len(unit) == 1 or sequences.tokens(unit) <= budget:
        yield unit
        return
    for half in _split(sequences, unit, 2):
        yield from _within(sequences, half, budget)
