"""Reference log-probs of a batch from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlmath.types import TrainingBatch


@torch.no_grad()
def hf_log_probs(folder: str | Path, batch: TrainingBatch, temperature: float) -> Tensor:
    """Log-probabilities of the batch's response tokens from ``transformers``, on the CPU.

    One sequence at a time, without padding, in float32 up to the logits and in float64 after them.
    Returns ``[R]`` float32, in the batch's order.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    pieces, start = [], 0
    for prompt, size in zip(
        batch.prompt_lengths.tolist(), batch.sequence_lengths.tolist(), strict=True
    ):
        tokens = batch.tokens[start : start + size].long()
        start += size
        logits = model(tokens[None]).logits[0, prompt - 1 : -1].double() / temperature
        pieces.append(logits.log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1))
    return torch.cat(pieces).float()
