"""Gradients of sequences by formulas that are written a second time.

The derivative of the loss with respect to a sequence's log-probs follows from those, from the old,
rollout and reference log-probs, and from advantages and weights, in every minibatch. Here it is
computed in float64 without a line of ``rlmath/algorithms``, so that another clip range, an inverted
ratio, a maximum for a minimum, a term without a gradient, or log-probs of another sequence show as
a difference from what the backward pass gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlmath.actor.plan import StepPlan
from rlmath.actor.sequence_report import places_in_sequences
from rlmath.algorithms.correction import NONE, CorrectionConfig
from rlmath.algorithms.ragged import repeat
from rlmath.batching.shards import Share

# Log-ratios are clamped there, and a KL of k3 at its limit; neither has a gradient beyond.
LIMIT, KL_LIMIT = 20.0, 10.0
# Float32 tolerances: of a ratio or log-ratio at a bound, and of two sums.
NEAR, TOLERANCE = 1e-5, 1e-4

# (ratio, advantage, options) -> derivative of a token's policy loss by its log-prob
Slope = Callable[[Tensor, Tensor, Any], Tensor]


def _clip_slope(ratio: Tensor, advantages: Tensor, options: Any) -> Tensor:
    low, high, cap = _bounds(options)
    beyond = (advantages > 0) & (ratio > high)
    beyond |= (advantages < 0) & ((ratio < low) | (ratio > cap))
    return torch.where(beyond, 0.0, -ratio * advantages)


def _bounds(options: Any) -> tuple[float, float, float]:
    high = getattr(options, "clip_high", math.inf)
    cap = getattr(options, "dual_clip", None) or math.inf
    return 1.0 - getattr(options, "clip_low", math.inf), 1.0 + high, cap


def _cispo_slope(ratio: Tensor, advantages: Tensor, options: Any) -> Tensor:
    low, high, _ = _bounds(options)
    return -torch.clamp(ratio, low, high) * advantages


def _sapo_slope(ratio: Tensor, advantages: Tensor, options: Any) -> Tensor:
    tau = torch.where(advantages > 0, options.tau_positive, options.tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    return -4.0 * gate * (1.0 - gate) * ratio * advantages


SLOPES: dict[str, Slope] = {
    "cispo": _cispo_slope,
    "gspo": _clip_slope,
    "gspo_token": _clip_slope,
    "ppo_clip": _clip_slope,
    "reinforce": lambda ratio, advantages, options: -advantages,
    "sapo": _sapo_slope,
}
# Their ratio is the geometric mean over the sequence.
_OF_SEQUENCES = ("gspo", "gspo_token")


def second_gradients(share: Share, log_probs: Tensor, plan: StepPlan) -> Tensor:
    """``[N, 4]`` float64: of each sequence the sum over its tokens of the derivative of the loss
    with respect to their log-probs, how far that of the backward pass may be from it, the same sum
    with respect to their entropies, and the first sum with each token times its place. NaN where
    there is no second formula.

    Args:
        log_probs: ``[R]`` float32, the policy's in its update, on the CPU.
    """
    batch, objective = share.batch, plan.objective
    count = len(batch.response_lengths)
    slope_of, reference = SLOPES.get(objective.loss), batch.ref_log_probs
    kl_slope_of = KL_SLOPES.get(objective.kl_estimator)
    assert batch.advantages is not None
    if slope_of is None or objective.off_policy_mask_kl is not None:
        return torch.full((count, 4), torch.nan, dtype=torch.float64)
    mask, totals = batch.loss_mask, _Sequences(batch.response_lengths)

    def in_loss(values: Tensor) -> Tensor:
        return torch.where(mask, values.double(), 0.0)

    own = in_loss(log_probs)
    old = own if batch.old_log_probs is None else in_loss(batch.old_log_probs)
    moved, advantages, weights = own - old, in_loss(batch.advantages), in_loss(share.weights)
    clamped = moved.abs() > LIMIT
    if objective.loss in _OF_SEQUENCES:
        moved = totals.mean(moved.clamp(-LIMIT, LIMIT), mask)
        clamped = totals.spread(clamped.double()) > 0
    ratio = moved.clamp(-LIMIT, LIMIT).exp()
    policy = weights * _factors(batch, mask, totals, plan)
    slopes = policy * slope_of(ratio, advantages, objective.loss_options)
    if objective.loss == "gspo":  # A token's loss has a gradient by all tokens of its sequence.
        slopes = torch.where(mask, totals.mean(slopes, mask), 0.0)
    # In float32 these may be on either side of a bound.
    near = clamped
    for bound in _bounds(objective.loss_options):
        near = near | ((ratio - bound).abs() < NEAR * max(1.0, abs(bound)))
    sizes = (policy * advantages * ratio).abs()
    slack = torch.where(near, sizes, 0.0) + TOLERANCE * torch.maximum(sizes, slopes.abs())
    if objective.kl_coef and reference is not None:
        if kl_slope_of is None:
            return torch.full((count, 4), torch.nan, dtype=torch.float64)
        apart, factor = own - in_loss(reference), objective.kl_coef * weights
        of_kl = kl_slope_of(apart)
        slopes = slopes + factor * of_kl
        # Near the limits it jumps; and in float32 that of k3 is the difference of two numbers near
        # 1, of which little is left where the policy is the reference but for rounding.
        around = kl_slope_of(apart + NEAR) - kl_slope_of(apart - NEAR)
        slack = slack + factor * (TOLERANCE * of_kl.abs() + 2 * around.abs())
    of_entropy = -objective.entropy_coef * weights
    by_place = slopes * places_in_sequences(totals.ids, count)
    columns = (slopes, slack, of_entropy, by_place)
    return torch.stack([totals.sum(one) for one in columns], dim=1)


class _Sequences:
    """Sums over the tokens of each sequence."""

    def __init__(self, lengths: Tensor) -> None:
        self.ids = repeat(torch.arange(len(lengths)), lengths)
        self._count = len(lengths)

    def sum(self, values: Tensor) -> Tensor:
        """``[N]``."""
        return values.new_zeros(self._count).index_add_(0, self.ids, values)

    def spread(self, values: Tensor) -> Tensor:
        """``[R]``, the sum over each token's sequence."""
        return self.sum(values)[self.ids]

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """``[R]``, the mean over each token's sequence; ``values`` are 0 where masked."""
        return self.spread(values) / self.spread(mask.double()).clamp(min=1.0)


def _k3(difference: Tensor) -> Tensor:
    value = torch.expm1(-difference) + difference
    inside = (difference.abs() <= LIMIT) & (value <= KL_LIMIT)
    return torch.where(inside, -torch.expm1(-difference), 0.0)


# Policy's log-prob less the reference's -> derivative of the KL by the policy's
KL_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.ones_like,
    "k2": lambda difference: difference,
    "k3": _k3,
}


def _factors(batch: Any, mask: Tensor, totals: _Sequences, plan: StepPlan) -> Tensor:
    """``[R]`` factors of the policy term."""
    correction, given = plan.correction, batch.policy_factors
    if plan.entropy_top_share < 1 or batch.old_log_probs is None:
        return torch.ones(len(mask)) if given is None else given
    if correction is None or not correction.is_on:
        return torch.ones(len(mask), dtype=torch.float64)
    weight = _correction_weights(batch, mask, totals, correction)
    return given if weight is None else torch.where(mask, weight, 0.0)


def _correction_weights(
    batch: Any, mask: Tensor, totals: _Sequences, correction: CorrectionConfig
) -> Tensor | None:
    """Weights of a mismatch correction; ``None``: it is somebody's own."""
    apart = batch.old_log_probs.double() - batch.engine_log_probs.double()
    apart = torch.where(mask, apart, 0.0)
    low, high = correction.bounds()
    token, low = apart.exp(), low or 0.0
    whole = totals.spread(apart).exp()
    mean = totals.mean(apart, mask).exp()
    one = torch.ones_like(apart)
    # Ratio, and weight within the bounds and above them.
    kinds = {
        NONE: (one, one, one),
        "token_truncate": (token, token, one * (high or 1.0)),
        "token_mask": (token, token, 0.0 * one),
        "seq_truncate": (whole, whole, one * (high or 1.0)),
        "seq_mask_geometric": (mean, one, 0.0 * one),
        "seq_mask_sum": (whole, whole, 0.0 * one),
    }
    if correction.kind not in kinds:
        return None
    ratio, inside, above = kinds[correction.kind]
    weight = torch.where(ratio > (high or math.inf), above, torch.where(ratio < low, 0.0, inside))
    vetoed = mask & (token < (correction.veto_below or 0.0))
    return torch.where(totals.spread(vetoed.double()) > 0, 0.0, weight)
