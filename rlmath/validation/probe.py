"""Sequences on which models are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlmath.errors import WeightsError
from rlmath.model.spec import read_model_spec
from rlmath.types import TrainingBatch


def batch_of(sequences: Sequence[tuple[list[int], list[int]]]) -> TrainingBatch:
    """A batch of (prompt, response) token ids, with nothing but the tokens in it.

    Raises:
        WeightsError: A prompt or a response without tokens.
    """
    for number, (prompt, response) in enumerate(sequences):
        if not prompt or not response:
            raise WeightsError(f"sequence {number} has no {'response' if prompt else 'prompt'}")
    n, total = len(sequences), sum(len(response) for _, response in sequences)
    return TrainingBatch(
        tokens=torch.tensor([t for p, r in sequences for t in (*p, *r)], dtype=torch.int64),
        prompt_lengths=torch.tensor([len(p) for p, _ in sequences]),
        response_lengths=torch.tensor([len(r) for _, r in sequences]),
        group_ids=torch.arange(n),
        weights_versions=torch.zeros(n, dtype=torch.int64),
        rewards=torch.zeros(n),
        engine_log_probs=torch.zeros(total),
        advantages=torch.zeros(total),
        loss_mask=torch.ones(total, dtype=torch.bool),
    )


def random_batch(folder: str | Path, sequences: int = 4, tokens: int = 64) -> TrainingBatch:
    """Random tokens of a model's vocabulary, the same each time, of uneven lengths."""
    spec = read_model_spec(folder)
    generator = torch.Generator().manual_seed(0)
    longest = min(tokens, spec.longest_sequence)
    drawn = torch.randint(spec.vocab, (sequences, longest), generator=generator).tolist()
    return batch_of([(row[:4], row[4 : longest - 3 * n]) for n, row in enumerate(drawn)])
