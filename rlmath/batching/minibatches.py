"""Splits a step's sequences into optimizer minibatches of equal size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence
from typing import Any


def minibatches(group_ids: Sequence[Hashable], k: int, seed: int) -> list[list[int]]:
    """Split ``N`` sequences into ``k`` minibatches whose sizes differ by at most one.

    Groups are shuffled by ``seed``, concatenated and split at equal distances. If all groups have
    the same size and ``k`` divides their number, no group is split. Otherwise at most ``k - 1``
    are: equal sizes matter more, because every minibatch is one optimizer step of the same weight.
    Advantages are computed earlier, from whole groups, so a split does not change them.

    The groups of a minibatch depend only on the ids and the seed, not on the order of the
    sequences.

    Args:
        group_ids: The group of each of the ``N`` sequences, of one sortable type; ``range(n)``
            without groups.
        k: Number of minibatches, that is, optimizer steps.
        seed: The same seed gives the same split on every machine.

    Returns:
        ``k`` lists of indices into ``group_ids``; each index is in exactly one list.

    Raises:
        ValueError: ``k`` is below 1, or there are fewer sequences than minibatches.
    """
    n = len(group_ids)
    if k < 1:
        raise ValueError(f"minibatches_per_step = {k}: at least 1 is needed")
    if n < k:
        raise ValueError(
            f"{n} sequences cannot make minibatches_per_step = {k} minibatches: each needs one "
            f"sequence at least; at most {n} would work"
        )
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    order = sorted(members)
    random.Random(seed).shuffle(order)
    laid_out = [index for group in order for index in members[group]]
    cuts = [i * n // k for i in range(k + 1)]
    return [laid_out[start:end] for start, end in itertools.pairwise(cuts)]
