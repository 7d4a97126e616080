"""The softmax of a chunk of logits with float32 tables, a few rows at a time.

For any device. ``softmax_triton.py`` has the same two functions for CUDA without tables.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlmath.actor.head_rows import rows_per_table
from rlmath.actor.logprobs import VocabSlice


def statistics(
    vocab: VocabSlice, logits: Tensor, local: Tensor, mine: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, the target's log-prob and the entropy of rows over all slices, ``[n]`` each.

    Args:
        logits: ``[n, v]`` with padding, before the temperature.
        local: ``[n]`` from :meth:`VocabSlice.places`.
        mine: ``[n]`` from :meth:`VocabSlice.places`.
    """
    found = [
        vocab.statistics(
            vocab.apply_temperature(logits[part, : vocab.num_valid]), local[part], mine[part]
        )
        for part in _parts(logits)
    ]
    log_z, log_probs, entropy = (torch.cat(column) for column in zip(*found, strict=True))
    return log_z, log_probs, entropy


def write_gradient(
    vocab: VocabSlice,
    logits: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    local: Tensor,
    mine: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite logits ``[n, v]`` with their gradient, and padding with zeros.

    The other arguments are ``[n]`` each, as in :meth:`VocabSlice.gradient`.
    """
    for part in _parts(logits):
        valid = logits[part, : vocab.num_valid]
        valid.copy_(
            vocab.gradient(
                vocab.apply_temperature(valid),
                log_z[part],
                entropy[part],
                local[part],
                mine[part],
                grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
            )
        )
    logits[:, vocab.num_valid :] = 0


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of rows."""
    step = rows_per_table(logits.size(1))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)
