"""A batch for the actor from prompts and responses that were not sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlmath.types import TrainingBatch


def batch_of_sequences(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], advantage: float = 0.0
) -> TrainingBatch:
    """Concatenate (prompt, response) token ids, each in its own group. ``sequences``: pairs with a
    response of at least one token."""
    count, total = len(sequences), sum(len(response) for _, response in sequences)
    return TrainingBatch(
        tokens=torch.tensor(
            [t for prompt, response in sequences for t in (*prompt, *response)], dtype=torch.int32
        ),
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in sequences]),
        response_lengths=torch.tensor([len(response) for _, response in sequences]),
        group_ids=torch.arange(count),
        weights_versions=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
        engine_log_probs=torch.zeros(total),
        advantages=torch.full((total,), advantage),
        loss_mask=torch.ones(total, dtype=torch.bool),
    )
