"""Sequences on which models are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.errors import WeightsError
from rlmath.model.spec import read_model_spec
from rlmath.types import TrainingBatch


def batch_of(sequences: Sequence[tuple[list[int], list[int]]]) -> TrainingBatch:
    """A batch of (prompt, response) token ids without further values. Raises WeightsError: a prompt
    or a response has no tokens."""
    for number, (prompt, response) in enumerate(sequences):
        if not prompt or not response:
            raise WeightsError(f"sequence {number} has no {'response' if prompt else 'prompt'}")
    return batch_of_sequences(sequences)


def random_batch(folder: str | Path, sequences: int = 4, tokens: int = 64) -> TrainingBatch:
    """Sequences of uneven lengths, with random tokens of the vocabulary, the same on each call."""
    spec = read_model_spec(folder)
    generator = torch.Generator().manual_seed(0)
    longest = min(tokens, spec.max_positions)
    drawn = torch.randint(spec.vocab, (sequences, longest), generator=generator).tolist()
    return batch_of([(row[:4], row[4 : longest - 3 * n]) for n, row in enumerate(drawn)])
