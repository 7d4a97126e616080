"""On-policy distillation: the policy learns from a teacher's log-probs of its sampled tokens.

For a token ``y_t`` that the policy sampled, ``log pi_old(y_t) - log p_teacher(y_t)`` is an unbiased
single-sample estimate of the reverse KL between policy and teacher at that position,
``KL(pi || p_teacher) = E_{y ~ pi}[log pi(y) - log p_teacher(y)]``. Its negative is the token's
advantage: a policy gradient with it descends the reverse KL of the next token at each position of
the policy's own responses (discount 0: a token's effect on later ones does not count).

MiniLLM (arXiv:2306.08543), eqs. 2 and 6, has the reverse KL over sequences, of which this is the
single-step part; GKD (arXiv:2306.13649) the divergence per token on the student's own samples; the
form of the advantage is from K. Lu and Thinking Machines Lab, "On-Policy Distillation" (2025).
None of them bounds the difference. Here it is bounded, because a single token that the teacher
rules out could otherwise dominate a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.algorithms.totals import Totals
from rlmath.utils.lazy_torch import Tensor, torch

# Parts of a response for which the reverse KL is logged, and the bins of its quantile, in nats.
PARTS = 4
_LOWEST, _BIN_NATS, _BINS = -20.0, 0.05, 1200


@dataclass(frozen=True)
class DistillTotals(Totals):
    """Sums of the reverse KL over tokens of the loss."""

    tokens: tuple[float, ...]  # [PARTS] number of tokens in each part of the responses.
    sums: tuple[float, ...]  # [PARTS] sums of log pi_old - log p_teacher, clipped, in nats.
    clipped: float  # Number of tokens beyond the bound.
    histogram: Tensor  # Token counts by that difference, int64.

    def quantile(self, share: float) -> float:
        """The difference at the quantile ``share``, to 0.05 nats; 0 without tokens."""
        below = torch.cumsum(self.histogram, 0)
        if not int(below[-1]):
            return 0.0
        rank = max(1, math.ceil(share * int(below[-1])))
        return _LOWEST + _BIN_NATS * (int(torch.searchsorted(below, rank)) + 1)

    def metrics(self) -> dict[str, float]:
        """Metrics; a part without tokens is left out."""
        count = sum(self.tokens)
        metrics = {
            "reverse_kl": sum(self.sums) / max(count, 1.0),
            "reverse_kl_p99": self.quantile(0.99),
            "clipped_share": self.clipped / max(count, 1.0),
        }
        for part, (tokens, total) in enumerate(zip(self.tokens, self.sums, strict=True), 1):
            if tokens:
                metrics[f"reverse_kl_part_{part}"] = total / tokens
        return metrics


@dataclass(frozen=True)
class Distilled:
    """A teacher's advantages for responses."""

    advantages: Tensor  # [R] float32, to be added; 0 where the mask is false.
    totals: DistillTotals  # Totals for the metrics.


def distill(
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    *,
    coef: float,
    clip: float,
) -> Distilled:
    """``coef clip(log p_teacher - log pi_old)`` of each token, clipped to ``±clip`` nats.

    Args:
        old_log_probs: ``[R]``, the policy's before the update, at the sampling temperature.
        teacher_log_probs: ``[R]``, for the same tokens; minus infinity where the teacher rules a
            token out.
        mask: ``[R]`` bool, tokens in the loss.
        response_lengths: ``[N]`` int64, in tokens; their sum is ``R``.
        clip: Bound, in nats.

    Raises:
        ValueError: A log-prob of a token in the loss is NaN.
    """
    difference = teacher_log_probs.double() - old_log_probs.double()
    difference = torch.where(mask, difference, 0.0)
    if difference.isnan().any():
        raise ValueError(
            f"{int(difference.isnan().sum())} of {int(mask.sum())} log-probs of the teacher, or of "
            "the policy, are not numbers"
        )
    bounded = difference.clamp(-clip, clip)
    return Distilled(
        (coef * bounded).float(), _totals(-difference, -bounded, mask, response_lengths)
    )


def _totals(kl: Tensor, bounded: Tensor, mask: Tensor, lengths: Tensor) -> DistillTotals:
    parts = _parts(lengths)[mask]
    own = bounded[mask]
    counts = torch.bincount(parts, minlength=PARTS)
    sums = own.new_zeros(PARTS).index_add_(0, parts, own)
    bins = ((own - _LOWEST) / _BIN_NATS).clamp(0, _BINS - 1).long()
    return DistillTotals(
        tuple(counts.double().tolist()),
        tuple(sums.tolist()),
        float((kl[mask] != own).sum()),
        torch.bincount(bins, minlength=_BINS),
    )


def _parts(lengths: Tensor) -> Tensor:
    """``[R]`` index of the part of its response that each token is in, from 0."""
    of_token = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(int(lengths.sum())) - starts[of_token]
    return PARTS * within // lengths[of_token].clamp(min=1)
