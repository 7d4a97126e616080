"""Whether a response repeats itself."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlmath.types import Repetition

# A response that has begun to repeat itself does so to its end, so its end is looked at.
TAIL_BYTES = 4096
TAIL_TOKENS = 1024
# Text that is shorter says nothing: any text that short compresses badly.
LEAST_BYTES = 256
NGRAM = 8
# Worked mathematics compresses 2 to 4 times; one sentence over and over more than 15 times.
REPETITIVE_COMPRESSION = 8.0
# Share of n-grams of 8 tokens that came before. Long derivations that carry expressions along
# reach 0.3.
REPETITIVE_NGRAMS = 0.7


def compression_ratio(text: str) -> float:
    """Bytes of the text's end over its bytes after zlib (level 6); 1 for a short text."""
    data = text.encode(errors="surrogatepass")[-TAIL_BYTES:]
    if len(data) < LEAST_BYTES:
        return 1.0
    return len(data) / len(zlib.compress(data, 6))


def repeated_ngrams(token_ids: Sequence[int] | NDArray[np.int32]) -> float:
    """Share of the end's n-grams that are not the first of their kind; 0 when there is none."""
    tail = np.asarray(token_ids[-TAIL_TOKENS:], np.int32)
    count = len(tail) - NGRAM + 1
    if count < 1:
        return 0.0
    data, size = tail.tobytes(), tail.itemsize
    return 1.0 - len({data[size * i : size * (i + NGRAM)] for i in range(count)}) / count


def repetition(text: str, token_ids: Sequence[int] | NDArray[np.int32]) -> Repetition:
    """Both measures, and whether either is past its limit.

    N-grams count from ``LEAST_BYTES`` tokens on: a short answer may well say a thing twice.
    """
    ratio, ngrams = compression_ratio(text), repeated_ngrams(token_ids)
    is_long = len(token_ids) >= LEAST_BYTES
    return Repetition(
        ratio, ngrams, ratio > REPETITIVE_COMPRESSION or (is_long and ngrams > REPETITIVE_NGRAMS)
    )
