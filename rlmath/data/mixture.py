"""Streams that mix several files in fixed shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.data.stream import Item, ProblemStream, other_data
from rlmath.errors import UserError


class MixedStream(ProblemStream[Item]):
    """Problems of several sources, each in its own seeded order, in given shares.

    The next problem is from the source furthest behind its share, the first among equals: after
    ``n`` problems each source has given ``n`` times its share, to within one for two sources, and
    always to within the number of sources. A short source starts over, in another order, while
    the others are still in their first epoch.

    Args:
        sources: The problems of each source, at least one.
        weights: A weight for each source, to which its share is proportional.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Item]],
        weights: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__([item for items in sources for item in items], seed, shuffle)
        if len(sources) != len(weights) or min(weights) <= 0:
            raise ValueError(f"{len(sources)} sources need as many weights above 0, not {weights}")
        self._parts = [ProblemStream(items, seed, shuffle) for items in sources]
        self._weights = [float(weight) for weight in weights]

    def next(self, k: int) -> list[Item]:
        batch: list[Item] = []
        total = sum(self._weights)
        for _ in range(k):
            self._taken += 1
            behind = [
                weight / total * self._taken - part.taken
                for weight, part in zip(self._weights, self._parts, strict=True)
            ]
            batch += self._parts[behind.index(max(behind))].next(1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, overall and in each source."""
        parts = [part.state_dict() for part in self._parts]
        return super().state_dict() | {"weights": self._weights, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises UserError: it is a position in other data or in another
        order."""
        if "source" not in state and state.get("weights") != self._weights:
            before = state.get("weights") or "empty"
            raise other_data("data.train_weights", before, self._weights)
        super().load_state_dict(state)
        for part, saved in zip(self._parts, state["parts"], strict=True):
            # The prompts of all sources have been compared.
            part.load_state_dict({key: saved[key] for key in saved if key != "prompts"})


def stream_of(
    items: Sequence[Item], weights: Sequence[float], seed: int, shuffle: bool
) -> ProblemStream[Item]:
    """A stream of the items of one list of files, in shares if there are weights. Raises UserError:
    a file gave no problem, so that its weight has nothing to draw from."""
    if not weights:
        return ProblemStream(items, seed, shuffle)
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.id.rpartition(":")[0], []).append(item)
    if len(by_file) != len(weights):
        raise UserError(
            f"data.train_weights: there are {len(weights)} weights, but problems are left of "
            f"{len(by_file)} files ({', '.join(by_file)}); leave out files that give none"
        )
    return MixedStream(list(by_file.values()), weights, seed, shuffle)
