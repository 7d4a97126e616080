"""Importance weights that correct for an engine that samples from a different distribution.

With ``w_t = exp(logp_trainer - logp_engine)`` per token, ``W = prod w_t`` and ``G = W^(1/n)`` over
the ``n`` unmasked tokens of a sequence:

==================== =============================================== ================ ============
kind                 weight of a token                               bounds           from
==================== =============================================== ================ ============
none                 1
token_truncate       ``min(w, high)``                                high 2           TIS
token_mask           ``w`` within the bounds, else 0                 0.5 to 5         IcePop
seq_truncate         ``min(W, high)``                                high 2           TIS, sequences
seq_mask_geometric   1 where ``G`` is within the bounds, else 0      0.99 to 1.01     Geo-RS
seq_mask_sum         ``W`` within the bounds, else 0                 0.5 to 2         MIS, sequences
==================== =============================================== ================ ============

A veto can be added to each: a sequence with one token whose ``w`` is below ``veto_below`` gets 0.

The weights multiply those of the aggregation in the policy term, but not in the KL and entropy
terms. The aggregation's denominators are unchanged: they count masked tokens, as in the papers'
formulas.

Papers: TIS, "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al.
2025); IcePop, Ring-1T (arXiv:2510.18855); sequence kinds and the veto, "When speed kills stability"
(Liu et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlmath.algorithms.mismatch import Mismatch
from rlmath.algorithms.totals import Totals
from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class LogRatios:
    """``log w`` of whole sequences, in nats, float64; 0 at masked tokens."""

    tokens: Tensor  # [R], per token.
    sums: Tensor  # [R], sum over the unmasked tokens of a token's sequence: log W.
    means: Tensor  # [R], their mean: log G.


@dataclass(frozen=True)
class Weighted:
    """Token weights of a correction."""

    weights: Tensor  # [R] float64.
    kept: Tensor | None = None  # [R] bool; the other tokens get 0. None: all are kept.
    # [R] bool, tokens whose weight was clipped to the upper bound; None: none.
    truncated: Tensor | None = None


class Bounds(NamedTuple):
    """Lower and upper bound of a ratio; ``None``: the kind has no such bound."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class CorrectionTraits:
    """Properties of a correction."""

    low: float | None = None  # Its default lower bound; None: no bound.
    high: float | None = None  # Its default upper bound.


# (log-ratios, bounds, options) -> weights, before the veto
Rule = Callable[[LogRatios, Bounds, Any], Weighted]
CORRECTIONS: Registry[Rule, CorrectionTraits] = Registry(
    "algorithm.correction.kind", CorrectionTraits
)
NONE, AUTO = "none", "auto"


@CORRECTIONS.register(NONE)
def no_correction(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """Weight 1 for each token."""
    return Weighted(torch.ones_like(ratios.tokens))


@CORRECTIONS.register(AUTO)
def auto(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """Placeholder: :func:`choose` selects the kind for each step."""
    raise ValueError("mismatch correction 'auto': call choose() with the batch's measurement")


@CORRECTIONS.register("token_truncate", traits=CorrectionTraits(high=2.0))
def token_truncate(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """``min(w, high)``."""
    return _truncate(ratios.tokens.exp(), bounds)


@CORRECTIONS.register("token_mask", traits=CorrectionTraits(0.5, 5.0))
def token_mask(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """``w`` within the bounds, else 0."""
    ratio = ratios.tokens.exp()
    return Weighted(ratio, _inside(ratio, bounds))


@CORRECTIONS.register("seq_truncate", traits=CorrectionTraits(high=2.0))
def seq_truncate(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """``min(W, high)``."""
    return _truncate(ratios.sums.exp(), bounds)


@CORRECTIONS.register("seq_mask_geometric", traits=CorrectionTraits(0.99, 1.01))
def seq_mask_geometric(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """1 where ``G`` is within the bounds, else 0."""
    return Weighted(torch.ones_like(ratios.means), _inside(ratios.means.exp(), bounds))


@CORRECTIONS.register("seq_mask_sum", traits=CorrectionTraits(0.5, 2.0))
def seq_mask_sum(ratios: LogRatios, bounds: Bounds, options: Options) -> Weighted:
    """``W`` within the bounds, else 0."""
    ratio = ratios.sums.exp()
    return Weighted(ratio, _inside(ratio, bounds))


def _truncate(ratio: Tensor, bounds: Bounds) -> Weighted:
    return Weighted(ratio.clamp(max=bounds.high), truncated=ratio > bounds.high)


def _inside(ratio: Tensor, bounds: Bounds) -> Tensor:
    return (ratio >= bounds.low) & (ratio <= bounds.high)


@dataclass
class CorrectionConfig:
    kind: str = setting(
        NONE,
        "Off-policy correction of the trainer-engine mismatch with w = exp(logp_actor - "
        "logp_engine): none, token_truncate (TIS), token_mask (IcePop), seq_truncate, "
        "seq_mask_geometric, seq_mask_sum, or auto, which measures each step and chooses none, "
        "token_truncate or token_mask; or your own.",
    )
    options: dict[str, Any] = setting(dict, "Options of a correction of yours.")
    low: float | None = setting(
        None, "Lower bound; null: the kind's default, see docs/algorithms.md.", above=0
    )
    high: float | None = setting(None, "Upper bound; null: the kind's default.", above=0)
    veto_below: float | None = setting(
        None,
        "Exclude sequences that contain a token with w below this; null: off. 1e-4 is common.",
        above=0,
        below=1,
    )
    off_policy_mask_kl: float | None = setting(
        None,
        "Exclude a sequence with negative advantage from the policy loss if its mean log(engine / "
        "current probability) exceeds this, in nats; null: off.",
        least=0,
    )

    @property
    def is_on(self) -> bool:
        """Whether any token's weight can differ from 1."""
        return self.kind != NONE or self.veto_below is not None

    def bounds(self) -> Bounds:
        """The bounds in effect; ``None`` where the kind has none."""
        traits = CORRECTIONS.traits(self.kind)
        return Bounds(
            self.low if self.low is not None else traits.low,
            self.high if self.high is not None else traits.high,
        )


@dataclass(frozen=True)
class LagTotals(Totals):
    """Effect of a correction on the tokens of one lag."""

    tokens: int = 0  # Unmasked tokens.
    rejected: int = 0  # Unmasked tokens with weight 0.
    truncated: int = 0  # Tokens whose weight was clipped to the upper bound.


@dataclass(frozen=True)
class CorrectionTotals(Totals):
    tokens: int  # Unmasked tokens.
    sequences: int  # Sequences with unmasked tokens.
    rejected: int  # Unmasked tokens with weight 0.
    vetoed: int  # Sequences excluded by veto_below.
    truncated: int  # Tokens whose weight was clipped to the upper bound.
    weight: float  # Sum of the weights.
    # Totals by the age of the weights that sampled the tokens; empty if lags are unknown.
    by_lag: Mapping[int, LagTotals] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """``rejected_tokens`` and ``vetoed_sequences`` (shares of the unmasked tokens and of the
        sequences that have any), ``truncated_tokens`` and ``mean_weight``; the shares of tokens
        also per lag as ``lag_<n>/...``, unless all tokens are of the newest weights."""
        tokens = max(self.tokens, 1)
        by_lag: dict[str, float] = {}
        for lag, one in self.by_lag.items() if self.by_lag.keys() - {0} else ():
            by_lag[f"lag_{lag}/rejected_tokens"] = one.rejected / max(one.tokens, 1)
            by_lag[f"lag_{lag}/truncated_tokens"] = one.truncated / max(one.tokens, 1)
        return by_lag | {
            "rejected_tokens": self.rejected / tokens,
            "vetoed_sequences": self.vetoed / max(self.sequences, 1),
            "truncated_tokens": self.truncated / tokens,
            "mean_weight": self.weight / tokens,
        }


@dataclass(frozen=True)
class Correction:
    """Correction weights of a batch."""

    weights: Tensor  # [R], in the log-probs' dtype, 0 at masked tokens.
    kind: str  # The kind used, with auto resolved.
    totals: CorrectionTotals  # The effect.


def choose(mismatch: Mismatch) -> tuple[str, str]:
    """The kind of correction that ``auto`` selects, and why.

    - ``none`` if ``mean exp|d|`` is at most 1.002 and the effective sample size at least 0.999:
      float32 on both sides, where a correction would only add noise;
    - ``token_truncate`` if they are at most 1.05 and at least 0.9: bfloat16 on both sides;
    - ``token_mask`` otherwise: some tokens differ too much to be trained on.

    Returns:
        A kind, and a sentence with the numbers.
    """
    m = mismatch.metrics()
    mean, ess = m["mean_exp_abs_diff"], m["effective_sample_size"]
    seen = f"mean exp|d| = {mean:.4g}, effective sample size = {ess:.4g}"
    if mean <= 1.002 and ess >= 0.999:
        return NONE, f"{seen}: within 1.002 and 0.999, engine and trainer agree"
    if mean <= 1.05 and ess >= 0.9:
        return (
            "token_truncate",
            f"{seen}: within 1.05 and 0.9, small differences are reweighted",
        )
    return (
        "token_mask",
        f"{seen}: beyond 1.05 or 0.9, tokens that are far apart are left out",
    )


def correct(
    trainer_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    settings: CorrectionConfig,
    lags: Tensor | None = None,
) -> Correction:
    """Weights for the tokens of a batch, from whole sequences, before the batch is sharded.

    Args:
        trainer_log_probs: ``[R]``, in nats, of the weights that sampled.
        engine_log_probs: ``[R]``, in nats.
        mask: ``[R]`` bool; false tokens are ignored and get 0.
        response_lengths: ``[N]`` int64, in tokens.
        settings: The correction; ``auto`` must first be resolved by ``choose``.
        lags: ``[R]`` int64, age of the weights that sampled, in versions; ``None``: the totals have
            no lags.

    Raises:
        ValueError: Kind is ``auto``, or shapes do not match.
    """
    if int(response_lengths.sum()) != mask.numel():
        raise ValueError(
            f"response_lengths add up to {int(response_lengths.sum())} tokens, but the mask has "
            f"{mask.numel()}"
        )
    n = response_lengths.numel()
    ids = torch.repeat_interleave(torch.arange(n, device=mask.device), response_lengths)
    d = torch.where(mask, trainer_log_probs.double() - engine_log_probs.double(), 0.0)
    zeros = torch.zeros(n, dtype=torch.float64, device=mask.device)
    tokens = zeros.index_add(0, ids, mask.double())
    total = zeros.index_add(0, ids, d)

    ratios = LogRatios(d, total[ids], (total / tokens.clamp(min=1))[ids])
    options = CORRECTIONS.options(settings.kind).of(settings.options)
    found = CORRECTIONS.get(settings.kind)(ratios, settings.bounds(), options)
    truncated = torch.zeros_like(mask) if found.truncated is None else mask & found.truncated
    vetoed = torch.zeros(n, dtype=torch.bool, device=mask.device)
    if settings.veto_below is not None:
        outlier = mask & (d.exp() < settings.veto_below)
        vetoed = zeros.index_add(0, ids, outlier.double()) > 0
    keep = mask & ~vetoed[ids]
    keep = keep if found.kept is None else keep & found.kept
    weights = torch.where(keep, found.weights, 0.0)

    return Correction(
        weights=weights.to(trainer_log_probs.dtype),
        kind=settings.kind,
        totals=CorrectionTotals(
            tokens=int(mask.sum()),
            sequences=int((tokens > 0).sum()),
            rejected=int((mask & ~keep).sum()),
            vetoed=int(vetoed.sum()),
            truncated=int(truncated.sum()),
            weight=float(weights.sum()),
            by_lag={} if lags is None else LagTotals.by_value(lags, mask, mask & ~keep, truncated),
        ),
    )
