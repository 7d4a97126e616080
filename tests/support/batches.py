"""Batches of sequences that were not sampled, by their lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlmath.algorithms.losses import LossInputs
from rlmath.types import TrainingBatch


def batch_of_lengths(
    prompts: Tensor | Sequence[int], responses: Tensor | Sequence[int], **fields: Tensor
) -> TrainingBatch:
    """A batch whose token ids count from 0; each sequence is its own group, and all are trained on.

    Args:
        prompts: Tokens of each prompt.
        responses: Tokens of each response.
        fields: Others than these.
    """
    prompts, responses = torch.as_tensor(prompts), torch.as_tensor(responses)
    count, total = len(prompts), int(responses.sum())
    given = {
        "tokens": torch.arange(total + int(prompts.sum())),
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "group_ids": torch.arange(count),
        "weights_versions": torch.zeros(count, dtype=torch.int64),
        "rewards": torch.zeros(count),
        "engine_log_probs": torch.zeros(total),
        "loss_mask": torch.ones(total, dtype=torch.bool),
    }
    return TrainingBatch(**given | fields)


def loss_inputs(share, log_probs, entropy=None):
    """A whole share as one micro-batch of the objective."""
    batch = share.batch
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=batch.old_log_probs,
        engine_log_probs=batch.engine_log_probs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        weights=share.weights,
        sequence_ids=torch.repeat_interleave(torch.arange(len(batch)), batch.response_lengths),
        ref_log_probs=batch.ref_log_probs,
        entropy=entropy,
        policy_factors=batch.policy_factors,
    )
