"""Reduction of token losses to one number.

Every kind is a weight per token, computed from the whole optimizer minibatch before it is sharded:

    loss = sum over the minibatch of weight_t * loss_t

On any distribution of tokens over ranks and micro-batches, the backward pass only adds, and the
gradient is the same. Nothing is divided again by a number of ranks or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options

# (unmasked tokens [N] float64, group of each sequence [N], constant_length, options)
# -> [N] float64
_Kind = Callable[[Tensor, Tensor, "int | None", Any], Tensor]


class Whole(Enum):
    """Quantity of the whole minibatch that divides a weight."""

    tokens = "tokens"
    sequences = "sequences"
    groups = "groups"


@dataclass(frozen=True)
class AggregationTraits:
    """Properties of an aggregation."""

    # Quantity of the whole minibatch that divides its weights: the unmasked tokens, or the
    # sequences or groups that have any. Otherwise a sequence's weight depends only on its group.
    whole: Whole = Whole.sequences


AGGREGATIONS: Registry[_Kind, AggregationTraits] = Registry(
    "algorithm.aggregation", AggregationTraits
)


def sequence_weights(
    kind: str,
    token_counts: Tensor,
    group_ids: Tensor,
    constant_length: int | None = None,
    options: Options | None = None,
) -> Tensor:
    """Weight of each unmasked response token in the loss of an optimizer minibatch, by sequence.

    With ``m_t`` the mask, ``n_i`` the unmasked tokens of sequence ``i``, ``S`` the sequences that
    have any, ``P`` the groups (prompts) that have any, and ``L`` ``constant_length``:

    ==================== ==================================  ====================================
    kind                 weight of token t of sequence i     from
    ==================== ==================================  ====================================
    token_mean           m_t / sum_j n_j                     DAPO (arXiv:2503.14476), eq. 8
    seq_mean_token_mean  m_t / (S n_i)                       GRPO (arXiv:2402.03300), eq. 3
    seq_mean_token_sum   m_t / S                             log-probability of a sequence
    seq_sum_constant     m_t / (S L)                         Dr. GRPO (arXiv:2503.20783), §3.2
    prompt_mean          m_t / (P sum_{j in group} n_j)      equal weight of each prompt
    ==================== ==================================  ====================================

    Sequences without an unmasked token (unscored, or masked because they were truncated) are not
    counted. The weights depend only on ``n_i`` and the groups, so a rank with some of the
    sequences needs only their weights.

    Args:
        kind: One of the table's kinds.
        token_counts: ``[N]`` unmasked response tokens of each sequence of the minibatch.
        group_ids: ``[N]`` int64.
        constant_length: Tokens, only for ``seq_sum_constant``; usually the response limit.
        options: The kind's options; ``None``: its defaults.

    Returns:
        ``[N]`` float64; undefined for sequences without unmasked tokens.

    Raises:
        ValueError: Unknown kind, shapes do not match, or ``constant_length`` is missing.
    """
    weigh = AGGREGATIONS.get(kind)
    if token_counts.shape != group_ids.shape:
        raise ValueError(f"{token_counts.numel()} sequences, but {group_ids.numel()} group_ids")
    groups = torch.unique(group_ids, return_inverse=True)[1]
    options = AGGREGATIONS.options(kind)() if options is None else options
    return weigh(token_counts.double(), groups, constant_length, options)


def denominator(kind: str, token_counts: Tensor, group_ids: Tensor) -> float:
    """The divisor of the weights of :func:`sequence_weights` that needs the whole minibatch:
    ``sum_j n_j``, ``S`` or ``P`` in its table.

    For whole groups, the weights times this divisor depend only on these groups. Divisors of parts
    of a minibatch add up.

    Raises:
        ValueError: Unknown kind.
    """
    whole = AGGREGATIONS.traits(kind).whole
    takes_part = token_counts > 0
    if whole is Whole.tokens:
        return float(token_counts.sum())
    if whole is Whole.groups:
        return float(torch.unique(group_ids[takes_part]).numel())
    return float(takes_part.sum())


@AGGREGATIONS.register("token_mean", traits=AggregationTraits(Whole.tokens))
def _token_mean(counts: Tensor, groups: Tensor, length: int | None, options: Options) -> Tensor:
    return (1.0 / counts.sum().clamp(min=1)).expand(counts.shape)


@AGGREGATIONS.register("seq_mean_token_mean")
def _seq_mean_token_mean(
    counts: Tensor, groups: Tensor, length: int | None, options: Options
) -> Tensor:
    return 1.0 / ((counts > 0).sum() * counts).clamp(min=1)


@AGGREGATIONS.register("seq_mean_token_sum")
def _seq_mean_token_sum(
    counts: Tensor, groups: Tensor, length: int | None, options: Options
) -> Tensor:
    return (1.0 / (counts > 0).sum().clamp(min=1).double()).expand(counts.shape)


@AGGREGATIONS.register("seq_sum_constant")
def _seq_sum_constant(
    counts: Tensor, groups: Tensor, length: int | None, options: Options
) -> Tensor:
    if length is None or length < 1:
        raise ValueError(
            f"algorithm.aggregation = 'seq_sum_constant' needs a constant_length of at least 1 "
            f"token, not {length}; rollout.max_response_tokens is the usual choice"
        )
    return _seq_mean_token_sum(counts, groups, None, options) / length


@AGGREGATIONS.register("prompt_mean", traits=AggregationTraits(Whole.groups))
def _prompt_mean(counts: Tensor, groups: Tensor, length: int | None, options: Options) -> Tensor:
    # There are at most as many groups as sequences.
    totals = torch.zeros_like(counts).index_add_(0, groups, counts)
    return 1.0 / ((totals > 0).sum() * totals[groups]).clamp(min=1)
