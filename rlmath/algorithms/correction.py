"""Importance weights that correct for an engine that samples from another distribution.

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

Each can be joined by a veto: a sequence with one token whose ``w`` is below ``veto_below`` gets 0.

The weights multiply those of the aggregation in the policy term, and not in the KL and entropy
terms. The aggregation's denominators stay what they are: a masked token counts there, as in the
papers' formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.mismatch import Mismatch
from rlmath.utils.lazy_torch import Tensor, torch

# Lower and upper bound of each kind; None: unbounded.
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "token_mask": (0.5, 5.0),
    "seq_truncate": (None, 2.0),
    "seq_mask_geometric": (0.99, 1.01),
    "seq_mask_sum": (0.5, 2.0),
}


@dataclass(frozen=True)
class CorrectionSettings:
    """What to correct and how far.

    Attributes:
        kind: One of the module's kinds, or ``auto`` (see ``choose``).
        low: Lower bound; ``None``: the kind's own.
        high: Upper bound; ``None``: the kind's own.
        veto_below: A sequence with a token whose ``w`` is below this takes no part; ``None``: no
            veto. 1e-4 is usual.
    """

    kind: str = "none"
    low: float | None = None
    high: float | None = None
    veto_below: float | None = None

    def __post_init__(self) -> None:
        if self.kind != "auto" and self.kind not in _BOUNDS:
            known = ", ".join(sorted([*_BOUNDS, "auto"]))
            raise ValueError(f"mismatch correction {self.kind!r} is not known; known are: {known}")
        own_low, own_high = _BOUNDS.get(self.kind, (None, None))
        for name, value, own in (("low", self.low, own_low), ("high", self.high, own_high)):
            if value is not None and own is None:
                raise ValueError(f"mismatch correction {self.kind!r} has no bound {name!r}")
            if value is not None and value <= 0.0:
                raise ValueError(f"mismatch correction's {name} = {value}: above 0 is needed")
        if self.veto_below is not None and not 0.0 < self.veto_below < 1.0:
            raise ValueError(f"veto_below = {self.veto_below}: above 0 and below 1 is needed")
        low, high = self.bounds(self.kind) if self.kind != "auto" else (None, None)
        if low is not None and high is not None and low > high:
            raise ValueError(f"mismatch correction: low = {low} is above high = {high}")

    def bounds(self, kind: str) -> tuple[float | None, float | None]:
        """The bounds that count for ``kind``."""
        own_low, own_high = _BOUNDS[kind]
        return (
            self.low if self.low is not None else own_low,
            self.high if self.high is not None else own_high,
        )


@dataclass(frozen=True)
class Correction:
    """Weights of a batch.

    Attributes:
        weights: ``[R]``, of the log-probs' dtype, 0 at masked tokens.
        kind: The kind that was used, ``auto`` resolved.
        metrics: ``rejected_tokens`` and ``vetoed_sequences`` (shares of the unmasked tokens and
            of sequences that have any), ``truncated_tokens`` and ``mean_weight``.
    """

    weights: Tensor
    kind: str
    metrics: dict[str, float]


def choose(mismatch: Mismatch) -> tuple[str, str]:
    """The kind of correction that ``auto`` takes, and why.

    - ``none`` when ``mean exp|d|`` is at most 1.002 and the effective sample size at least 0.999:
      float32 on both sides, where a correction would only add noise;
    - ``token_truncate`` when they are at most 1.05 and at least 0.9: bfloat16 on both sides;
    - ``token_mask`` otherwise: some tokens are so far apart that they teach the wrong thing.

    Args:
        mismatch: Of the batch that is to be corrected.

    Returns:
        A kind, and a sentence with the numbers.
    """
    m = mismatch.metrics()
    mean, ess = m["mean_exp_abs_diff"], m["effective_sample_size"]
    seen = f"mean exp|d| = {mean:.4g}, effective sample size = {ess:.4g}"
    if mean <= 1.002 and ess >= 0.999:
        return "none", f"{seen}: within 1.002 and 0.999, engine and trainer agree"
    if mean <= 1.05 and ess >= 0.9:
        return "token_truncate", f"{seen}: within 1.05 and 0.9, small differences are reweighted"
    return "token_mask", f"{seen}: beyond 1.05 or 0.9, tokens that are far apart are left out"


def correct(
    trainer_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Tensor,
    settings: CorrectionSettings,
) -> Correction:
    """Weights for the tokens of a batch, from whole sequences, before the batch is cut.

    Papers: TIS, "Your efficient RL framework secretly brings you off-policy RL training" (Yao et
    al. 2025); IcePop, Ring-1T (arXiv:2510.18855); sequence kinds and the veto, "When speed
    kills stability" (Liu et al. 2025).

    Args:
        trainer_log_probs: ``[R]``, in nats, by the weights that sampled.
        engine_log_probs: ``[R]``, in nats.
        mask: ``[R]`` bool; false tokens take no part and get 0.
        response_lengths: ``[N]`` int64, in tokens.
        settings: What to correct; ``auto`` has to be resolved by ``choose`` first.

    Raises:
        ValueError: ``auto``, or shapes that do not fit.
    """
    kind = settings.kind
    if kind == "auto":
        raise ValueError("mismatch correction 'auto': call choose() with the batch's measurement")
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

    low, high = settings.bounds(kind)
    if kind.startswith("token"):
        ratio = d.exp()
    elif kind == "seq_mask_geometric":
        ratio = (total / tokens.clamp(min=1))[ids].exp()
    else:
        ratio = total[ids].exp()
    inside = torch.ones_like(mask)
    truncated = torch.zeros_like(mask)
    if kind == "none":
        weights = torch.ones_like(d)
    elif kind.endswith("truncate"):
        assert high is not None
        truncated = mask & (ratio > high)
        weights = ratio.clamp(max=high)
    else:
        assert low is not None and high is not None
        inside = (ratio >= low) & (ratio <= high)
        weights = inside.double() if kind == "seq_mask_geometric" else ratio
    vetoed = torch.zeros(n, dtype=torch.bool, device=mask.device)
    if settings.veto_below is not None:
        outlier = mask & (d.exp() < settings.veto_below)
        vetoed = zeros.index_add(0, ids, outlier.double()) > 0
    keep = mask & inside & ~vetoed[ids]
    weights = torch.where(keep, weights, 0.0)

    count = max(int(mask.sum()), 1)
    return Correction(
        weights=weights.to(trainer_log_probs.dtype),
        kind=kind,
        metrics={
            "rejected_tokens": float((mask & ~keep).sum()) / count,
            "vetoed_sequences": float(vetoed.sum()) / max(int((tokens > 0).sum()), 1),
            "truncated_tokens": float(truncated.sum()) / count,
            "mean_weight": float(weights.sum()) / count,
        },
    )
