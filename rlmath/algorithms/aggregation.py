"""How the losses of tokens become one number.

Every kind is a weight per token, worked out from the whole optimizer minibatch before it is cut:

    loss = sum over the minibatch of weight_t * loss_t

So whichever ranks and micro-batches the tokens go to, the backward pass only adds, and the
gradient is the same. Nothing is divided again by a number of ranks or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

from rlmath.algorithms.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch

# (mask [R] bool, sequence of each token [R], group of each token [R], N, constant_length) -> [R]
_Kind = Callable[[Tensor, Tensor, Tensor, int, "int | None"], Tensor]

AGGREGATIONS: Registry[_Kind] = Registry("algorithm.aggregation")


def token_weights(
    kind: str,
    loss_mask: Tensor,
    response_lengths: Tensor,
    group_ids: Tensor,
    *,
    constant_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Weight of each response token in the loss of an optimizer minibatch.

    With ``m_t`` the mask, ``n_i`` the unmasked tokens of sequence ``i``, ``S`` the sequences that
    have any, ``P`` the groups (prompts) that have any, and ``L`` ``constant_length``:

    ==================== ==================================  ====================================
    kind                 weight of token t of sequence i     from
    ==================== ==================================  ====================================
    token_mean           m_t / sum_j n_j                     DAPO (arXiv:2503.14476), eq. 8
    seq_mean_token_mean  m_t / (S n_i)                       GRPO (arXiv:2402.03300), eq. 3
    seq_mean_token_sum   m_t / S                             a sequence's log-probability, whole
    seq_sum_constant     m_t / (S L)                         Dr. GRPO (arXiv:2503.20783), §3.2
    prompt_mean          m_t / (P sum_{j in group} n_j)      each prompt the same
    ==================== ==================================  ====================================

    Sequences without an unmasked token (unscored, or masked because they were cut off) are not
    counted. When no token is unmasked, all weights are 0.

    Args:
        kind: One of the above.
        loss_mask: ``[R]`` bool, true for tokens that take part.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        group_ids: ``[N]`` int64.
        constant_length: Tokens, for ``seq_sum_constant`` alone; the response limit is the usual
            choice.
        dtype: Of the result; ``None``: float32. The arithmetic is in float64.

    Returns:
        ``[R]``, of the mask's device.

    Raises:
        ValueError: Unknown kind, shapes that do not fit, or ``constant_length`` missing.
    """
    weigh = AGGREGATIONS.get(kind)
    if int(response_lengths.sum()) != loss_mask.numel():
        raise ValueError(
            f"response_lengths add up to {int(response_lengths.sum())} tokens, but loss_mask has "
            f"{loss_mask.numel()}"
        )
    if response_lengths.shape != group_ids.shape:
        raise ValueError(
            f"{response_lengths.numel()} response_lengths, but {group_ids.numel()} group_ids"
        )
    device = loss_mask.device
    lengths = response_lengths.to(device)
    n = lengths.numel()
    sequence = torch.repeat_interleave(torch.arange(n, device=device), lengths)
    group = torch.unique(group_ids.to(device), return_inverse=True)[1][sequence]
    return weigh(loss_mask.bool(), sequence, group, n, constant_length).to(dtype or torch.float32)


def _per(ids: Tensor, mask: Tensor, size: int) -> Tensor:
    """``[size]`` float64, unmasked tokens of each id."""
    counts = torch.zeros(size, dtype=torch.float64, device=mask.device)
    return counts.index_add_(0, ids, mask.double())


@AGGREGATIONS.register("token_mean")
def _token_mean(mask: Tensor, seq: Tensor, group: Tensor, n: int, length: int | None) -> Tensor:
    return mask.double() / mask.sum().clamp(min=1)


@AGGREGATIONS.register("seq_mean_token_mean")
def _seq_mean_token_mean(
    mask: Tensor, seq: Tensor, group: Tensor, n: int, length: int | None
) -> Tensor:
    counts = _per(seq, mask, n)
    return mask.double() / ((counts > 0).sum() * counts[seq]).clamp(min=1)


@AGGREGATIONS.register("seq_mean_token_sum")
def _seq_mean_token_sum(
    mask: Tensor, seq: Tensor, group: Tensor, n: int, length: int | None
) -> Tensor:
    return mask.double() / (_per(seq, mask, n) > 0).sum().clamp(min=1)


@AGGREGATIONS.register("seq_sum_constant")
def _seq_sum_constant(
    mask: Tensor, seq: Tensor, group: Tensor, n: int, length: int | None
) -> Tensor:
    if length is None or length < 1:
        raise ValueError(
            f"algorithm.aggregation = 'seq_sum_constant' needs a constant_length of at least 1 "
            f"token, not {length}; rollout.max_response_tokens is the usual choice"
        )
    return _seq_mean_token_sum(mask, seq, group, n, None) / length


@AGGREGATIONS.register("prompt_mean")
def _prompt_mean(mask: Tensor, seq: Tensor, group: Tensor, n: int, length: int | None) -> Tensor:
    # There are at most as many groups as sequences.
    counts = _per(group, mask, n)
    return mask.double() / ((counts > 0).sum() * counts[group]).clamp(min=1)
