"""A step's sequences, cut into optimizer minibatches of equal size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence
from typing import Any


def minibatches(group_ids: Sequence[Hashable], k: int, seed: int) -> list[list[int]]:
    """Cut ``N`` sequences into ``k`` minibatches whose sizes differ by at most one.

    Groups are put in an order drawn from ``seed``, laid end to end and cut at equal distances. So
    with groups of one size whose number ``k`` divides, no group is split. Otherwise at most
    ``k - 1`` groups are split: equal sizes come first, because the optimizer takes one step of
    the same weight per minibatch. Advantages are made before the cut, from whole groups, so a
    split changes no advantage.

    Which groups come together depends on the ids and the seed alone, and not on the order in
    which the sequences stand.

    Args:
        group_ids: The group of each of the ``N`` sequences, of one sortable type; ``range(n)``
            when there are no groups.
        k: Minibatches, that is, optimizer steps.
        seed: The same seed gives the same cut on every machine.

    Returns:
        ``k`` lists of indices into ``group_ids``; each index is in exactly one.

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
