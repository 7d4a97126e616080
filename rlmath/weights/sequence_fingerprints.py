"""A checksum of each sequence of a ragged array, whatever rank and order the sequences are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.ragged import repeat
from rlmath.weights.fingerprint import odd_factors


@dataclass(frozen=True)
class SequenceFingerprints:
    """What a rank reports of its sequences, so that two runs can be compared sequence by sequence.

    Attributes:
        places: ``[N]`` int64, of the sequences in the step.
        bits: By quantity ``[N]`` int64: equal for two runs if every value is equal bit by bit.
        sums: By quantity ``[N]`` float64, the sum of the values: how far they are apart.
    """

    places: Tensor
    bits: Mapping[str, Tensor]
    sums: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, places: Tensor, lengths: Tensor, values: Mapping[str, Tensor | None]
    ) -> SequenceFingerprints:
        """Fingerprints of some sequences.

        Args:
            places: ``[N]`` int64, of the sequences in the step.
            lengths: ``[N]`` int64, their tokens; the sum is ``R``.
            values: By quantity ``[R]`` float32; what is ``None`` is left out.
        """
        there = {name: value for name, value in values.items() if value is not None}
        factors = _factors(lengths) if there else lengths
        return cls(
            places,
            {name: _bits(value, lengths, factors) for name, value in there.items()},
            {name: _sums(value.double(), lengths) for name, value in there.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[SequenceFingerprints]) -> SequenceFingerprints:
        """Those of all ranks together, in the order of the step."""
        places = torch.cat([one.places for one in parts])
        order = torch.argsort(places)

        def together(of_parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat([one[name] for one in of_parts])[order] for name in of_parts[0]}

        return cls(
            places[order],
            together([one.bits for one in parts]),
            together([one.sums for one in parts]),
        )


def token_digests(tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` int64, a checksum of each sequence's tokens and of where its prompt ends.

    Args:
        tokens: ``[T]`` integers, sequence after sequence.
        prompt_lengths: ``[N]`` int64.
        lengths: ``[N]`` int64, of prompt and response.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    factors = odd_factors(0, longest, torch.device("cpu"))
    sums = [
        (one.to(torch.int64) + 1).mul_(factors[: len(one)]).sum()
        for one in tokens.split(lengths.tolist())
    ]
    return torch.stack(sums) * 3 + prompt_lengths if sums else torch.zeros_like(lengths)


def _factors(lengths: Tensor) -> Tensor:
    """``[R]`` an odd number for each place in its sequence."""
    starts = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(int(lengths.sum())) - repeat(starts, lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    return odd_factors(0, longest, torch.device("cpu"))[within]


def _bits(values: Tensor, lengths: Tensor, factors: Tensor) -> Tensor:
    """``[N]``: the sum of bits times factor, modulo ``2**64``. An odd factor is invertible, so a
    change of any single value changes it for certain."""
    # 0 and -0 are one number, and of bits that are all 0 nothing would be left.
    bits = (values + 0.0).contiguous().view(torch.int32).to(torch.int64) + 1
    return _sums(bits * factors, lengths)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """``[N]`` sums over the values of each sequence."""
    of_values = repeat(torch.arange(lengths.numel()), lengths)
    return values.new_zeros(lengths.numel()).index_add_(0, of_values, values)
