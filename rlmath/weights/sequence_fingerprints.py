"""A checksum of each sequence of a ragged array, independent of rank and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rlmath.algorithms.ragged import repeat
from rlmath.weights.fingerprint import odd_factors


@dataclass(frozen=True)
class SequenceFingerprints:
    """A rank's report on its sequences, to compare two runs sequence by sequence."""

    places: Tensor  # [N] int64, indices of the sequences in the step.
    # [N] int64 by quantity: equal for two runs if every value is equal bit by bit.
    bits: Mapping[str, Tensor]
    # [N] float64 by quantity, sums of the values: the size of a difference.
    sums: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, places: Tensor, lengths: Tensor, values: Mapping[str, Tensor | None]
    ) -> SequenceFingerprints:
        """Fingerprints of sequences.

        Args:
            places: ``[N]`` int64, indices of the sequences in the step.
            lengths: ``[N]`` int64, their tokens; the sum is ``R``.
            values: ``[R]`` float32 by quantity; ``None`` values are left out.
        """
        there = {name: value for name, value in values.items() if value is not None}
        factors = _factors(lengths) if there else lengths
        return cls(
            places,
            {name: _bits(value, lengths, factors) for name, value in there.items()},
            {name: _sums(value.double(), lengths) for name, value in there.items()},
        )

    @classmethod
    def join(cls, parts: Sequence[SequenceFingerprints]) -> SequenceFingerprints:
        """Combine the fingerprints of all ranks, in the order of the step."""
        places = torch.cat([one.places for one in parts])
        order = torch.argsort(places)

        def together(of_parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat([one[name] for one in of_parts])[order] for name in of_parts[0]}

        return cls(
            places[order],
            together([one.bits for one in parts]),
            together([one.sums for one in parts]),
        )


def token_digest(prompt: NDArray[np.int32], response: NDArray[np.int32]) -> int:
    """XXH3 of a sequence's tokens, with the length of its prompt as the seed, as an int64."""
    digest = xxhash.xxh3_64(seed=len(prompt))
    digest.update(np.ascontiguousarray(prompt, np.int32))
    digest.update(np.ascontiguousarray(response, np.int32))
    return int.from_bytes(digest.digest(), signed=True)


def token_digests(tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` int64, see :func:`token_digest`.

    Args:
        tokens: ``[T]`` integers, sequences concatenated.
        prompt_lengths: ``[N]`` int64.
        lengths: ``[N]`` int64, prompt plus response.
    """
    values = tokens.to(torch.int32).numpy()
    found, begin = torch.zeros_like(lengths), 0
    for place, (prompt, length) in enumerate(
        zip(prompt_lengths.tolist(), lengths.tolist(), strict=True)
    ):
        middle, end = begin + prompt, begin + length
        found[place] = token_digest(values[begin:middle], values[middle:end])
        begin = end
    return found


def _factors(lengths: Tensor) -> Tensor:
    """``[R]`` an odd number for each position in its sequence."""
    starts = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(int(lengths.sum())) - repeat(starts, lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    return odd_factors(0, longest, torch.device("cpu"))[within]


def _bits(values: Tensor, lengths: Tensor, factors: Tensor) -> Tensor:
    """``[N]``: sum of bits times factor, modulo ``2**64``. An odd factor is invertible, so a change
    of any single value always changes it."""
    # 0 and -0 are the same number; adding 1 makes zero bits count.
    bits = (values + 0.0).contiguous().view(torch.int32).to(torch.int64) + 1
    return _sums(bits * factors, lengths)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` sums over the values of each sequence."""
    of_values = repeat(torch.arange(lengths.numel()), lengths)
    return values.new_zeros(lengths.numel()).index_add_(0, of_values, values)
