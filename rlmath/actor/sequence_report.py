"""Contribution of each sequence to the loss, and its gradient, as seen by the ranks that trained on
it. The driver compares it with the expected values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.losses import LossInputs

# Columns of ``SequenceReport.sums``.
ADVANTAGE, PULL, SIZE, GRADIENT, ENTROPY, OLD, REFERENCE, MOMENT = range(8)


@dataclass(frozen=True)
class SequenceReport:
    """Sequences of an update. ``w`` are weights of tokens, ``f`` factors of the policy term, ``A``
    advantages, ``l`` log-probs.

    Attributes:
        minibatches: ``[n]`` int64, minibatch of each sequence.
        places: ``[n]`` int64, index in the step.
        tokens: ``[n]`` int64, see ``token_digest``.
        sums: ``[n, 8]`` float64, sums over the tokens in the loss of ``A``, of ``w f A``, of
            ``w f |A|``, and over all tokens of the gradients ``d loss / d l``, which is NaN if no
            backward pass reached the log-probs, and ``d loss / d entropy``, of the old and the
            reference log-probs, and of ``d loss / d l`` times the token's place.
        second: ``[n, 4]`` float64, see ``second_gradients``.
    """

    minibatches: Tensor
    places: Tensor
    tokens: Tensor
    sums: Tensor
    second: Tensor

    @classmethod
    def join(cls, parts: Sequence[SequenceReport]) -> SequenceReport:
        """Combine several ranks' or minibatches' reports."""
        return cls(
            torch.cat([one.minibatches for one in parts]),
            torch.cat([one.places for one in parts]),
            torch.cat([one.tokens for one in parts]),
            torch.cat([one.sums for one in parts]),
            torch.cat([one.second for one in parts]),
        )


def sums_of_sequences(inputs: LossInputs, count: int) -> Tensor:
    """``[count, 8]`` float64 on the inputs' device (see :class:`SequenceReport`); the backward pass
    fills in the gradient.
    """
    advantages = inputs.zero_masked(inputs.advantages).double()
    weights = inputs.zero_masked(inputs.weights).double()
    if inputs.policy_factors is not None:
        weights = weights * inputs.zero_masked(inputs.policy_factors).double()
    columns = [advantages, weights * advantages, weights * advantages.abs()]
    none, reference = torch.zeros_like(advantages), inputs.ref_log_probs
    unknown = torch.full_like(advantages, torch.nan)
    columns += [unknown, none, inputs.old_log_probs.double()]
    columns += [none if reference is None else reference.double(), unknown]
    found = advantages.new_zeros(count, 8)
    found.index_add_(0, inputs.sequence_ids, torch.stack(columns, dim=1))

    # A hook that refers to its own tensor, as ``inputs`` does, would keep the graph for ever.
    sequences = inputs.sequence_ids
    places = places_in_sequences(sequences, count)

    def receive(column: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # The loss has no such term.
        given = gradient.double()
        found[:, column] = found.new_zeros(count).index_add_(0, sequences, given)
        if column == GRADIENT:
            found[:, MOMENT] = found.new_zeros(count).index_add_(0, sequences, given * places)

    for column, values in ((GRADIENT, inputs.log_probs), (ENTROPY, inputs.entropy)):
        if values is not None and values.requires_grad:
            values.register_hook(functools.partial(receive, column))
    return found


def places_in_sequences(sequences: Tensor, count: int) -> Tensor:
    """``[r]`` float64, place of each token in its sequence, up to 1 for the last one.

    Args:
        sequences: ``[r]`` int64, each token's sequence, increasing.
    """
    lengths = sequences.new_zeros(count).index_add_(0, sequences, torch.ones_like(sequences))
    before = lengths.cumsum(0) - lengths
    numbers = torch.arange(1, len(sequences) + 1, device=sequences.device)
    return (numbers - before[sequences]).double() / lengths[sequences]
