"""A sequence of seeds derived from one seed, with random access.

SplitMix64 (doi:10.1145/2660193.2660195): a counter with a fixed stride and an invertible mixing
function. The counter starts at the mixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSE_FACTORS = tuple(pow(factor, -1, 2**64) for factor in _FACTORS)


class SeedStream:
    """Numbers in ``[0, 2**63)``, one after another. ``seed``: taken modulo ``2**64``."""

    def __init__(self, seed: int) -> None:
        self._state = _mix(seed & _MASK)

    def next(self) -> int:
        self._state = (self._state + _STRIDE) & _MASK
        return _mix(self._state) >> 1  # Positive as int64.


class SeedStreams:
    """Several streams in parallel, each giving one number at a time. ``streams``: must not be used
    until :meth:`put_back`."""

    def __init__(self, streams: Sequence[SeedStream]) -> None:
        self._streams = streams
        self._states = np.array([one._state for one in streams], np.uint64)

    def next(self) -> NDArray[np.int64]:
        """``[n]``, the next number of each stream."""
        self._states += np.uint64(_STRIDE)
        x = self._states
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTORS[0])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTORS[1])
        x ^= x >> np.uint64(31)
        return (x >> np.uint64(1)).view(np.int64)

    def put_back(self) -> None:
        """Write the current states back to the streams."""
        for stream, state in zip(self._streams, self._states.tolist(), strict=True):
            stream._state = state


def skip(seed: int, count: int) -> int:
    """The seed of the stream that starts after the first ``count`` numbers of another. Returns a
    number in ``[0, 2**64)``. ``seed``: seed of the other stream. ``count``: at least 0."""
    return _unmix((_mix(seed & _MASK) + count * _STRIDE) & _MASK)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _FACTORS[1]) & _MASK
    return x ^ (x >> 31)


def _unmix(x: int) -> int:
    """Inverse of :func:`_mix`."""
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * _INVERSE_FACTORS[1]) & _MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * _INVERSE_FACTORS[0]) & _MASK
    return x ^ (x >> 30) ^ (x >> 60)
