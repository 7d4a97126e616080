"""Passes over a part of a step's sequences, before the step has its shards.

Which sequences a pass has does not follow from the ranks' shares of the step, so log-probs go from
the ranks that computed them to those whose shard has the sequences, through Ray's shared memory.
Gradients stay where they are: of them only the sum counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlmath.actor.token_values import TokenValues
from rlmath.utils.array_refs import ArrayRef

# Log-probs and entropies of the response tokens of a rank's sequences; and the reference model's
# log-probs, if the pass has them.
Values = tuple[NDArray[np.float32], ...]


@dataclass(frozen=True)
class PassAhead:
    """A pass that the ranks were asked for.

    Attributes:
        places: Of each data-parallel rank, which of the pass's sequences it has, in its order.
        response_lengths: ``[n]`` int64, of the pass's sequences, in tokens.
        reports: Ray's references, of each rank: for log-probs, whether it is the one of its
            data-parallel share that reports; for a gradient, what it reports, a
            :class:`rlmath.actor.step_parts.PartFigures`, or ``None``.
        values: Likewise: :data:`Values` of the rank that reports; of a gradient none.
        arrays: Where responses of the pass are that stayed with the engines.
    """

    places: tuple[Tensor, ...]
    response_lengths: Tensor
    reports: tuple[Any, ...]
    values: tuple[Any, ...]
    arrays: tuple[ArrayRef, ...] = ()


@dataclass(frozen=True)
class StepPass:
    """A pass that was made ahead, and what it is of.

    Attributes:
        places: Of its sequences in the step.
        made: The pass.
    """

    places: tuple[int, ...]
    made: PassAhead


@dataclass(frozen=True)
class Piece:
    """Where the values of one sequence are.

    Attributes:
        source: Which of several :data:`Values`.
        first: Its first token there.
        tokens: Of its response.
    """

    source: int
    first: int
    tokens: int


@dataclass(frozen=True)
class Sources:
    """For each sequence of a step, which pass and data-parallel rank has its values, and where."""

    of_places: dict[int, tuple[int, int, int, int]]

    @classmethod
    def of(cls, passes: Sequence[StepPass]) -> Sources:
        """Of passes that together have each sequence once."""
        found: dict[int, tuple[int, int, int, int]] = {}
        for number, one in enumerate(passes):
            lengths = one.made.response_lengths.tolist()
            for rank, places in enumerate(one.made.places):
                first = 0
                for place in places.tolist():
                    in_step, tokens = one.places[place], lengths[place]
                    assert in_step not in found, f"sequence {in_step} is in two passes"
                    found[in_step] = number, rank, first, tokens
                    first += tokens
        return cls(found)

    def select(self, places: Sequence[int]) -> tuple[list[tuple[int, int]], tuple[Piece, ...]]:
        """What a rank needs.

        Args:
            places: In the step, of the rank's sequences.

        Returns:
            Pass and data-parallel rank of each of the :data:`Values`, and where each sequence is in
            them.
        """
        sources: dict[tuple[int, int], int] = {}
        pieces = []
        for place in places:
            number, rank, first, tokens = self.of_places[place]
            source = sources.setdefault((number, rank), len(sources))
            pieces.append(Piece(source, first, tokens))
        return list(sources), tuple(pieces)


def assemble(
    pieces: Sequence[Piece], values: Sequence[Values]
) -> tuple[TokenValues, Tensor | None]:
    """The values of a shard's response tokens, in its order, and the reference model's log-probs
    if the passes had them."""
    cut = [[x[one.first : one.first + one.tokens] for x in values[one.source]] for one in pieces]
    found = [torch.from_numpy(np.concatenate(one)) for one in zip(*cut, strict=True)]
    log_probs, entropy, *reference = found
    own = TokenValues(torch.arange(log_probs.numel()), log_probs, entropy)
    return own, reference[0] if reference else None
