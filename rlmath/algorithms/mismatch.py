"""Difference between engine and trainer in the log-probs of the same tokens.

With ``d = logp_trainer - logp_engine`` per token and ``w = exp(d)``. A ``Mismatch`` holds sums,
maxima and counts, so those of several batches, ranks or version lags add up; ``metrics`` converts
the total to numbers to log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, reduce
from itertools import repeat
from operator import add

from rlmath.utils.lazy_torch import Tensor, torch

# Tokens measured at once, each with 50 bytes of temporary memory.
CHUNK_TOKENS = 2**16


# Bins of d for quantiles: 32 per factor of two in |d| from 2^-27 to 2^7 on both sides of 0, so a
# quantile of d has a relative error of at most 3.2 % in between. The exponent and the leading bits
# of a float64 number its bin, which a search among edges takes four times as long for.
_BITS = 5
_FIRST, _LEVELS = (1023 - 27) << _BITS, (27 + 7) << _BITS
HISTOGRAM_STEP = 1 + 2**-_BITS


@cache
def _magnitudes() -> Tensor:
    return (torch.arange(_FIRST, _FIRST + _LEVELS + 1) << (52 - _BITS)).view(torch.float64)


@cache
def _edges() -> Tensor:
    return torch.cat([-_magnitudes().flip(0), _magnitudes()])


@cache
def _largest_in_bins() -> Tensor:
    """The largest ``|d|`` of each bin; NaN is in the last one."""
    above, end = _magnitudes()[1:], torch.tensor([torch.inf], dtype=torch.float64)
    return torch.cat([end, above.flip(0), _magnitudes()[:1], above, end])


@dataclass(frozen=True)
class Mismatch:
    """Totals over unmasked tokens."""

    tokens: int  # Number of tokens.
    exp_abs_sum: float  # Sum of exp(|d|).
    abs_sum: float  # Sum of |d|, in nats.
    abs_max: float  # Largest |d|, in nats.
    k3_sum: float  # Sum of w - 1 - d, the k3 estimate of KL(engine || trainer) in nats.
    # Largest d; 0 without tokens. Weights are summed relative to it, because w^2 underflows below
    # d = -372 and overflows above 354.
    scale: float
    w_sum: float  # Sum of exp(d - scale).
    w_square_sum: float  # Sum of exp(2 (d - scale)), at least 1 if there are tokens.
    histogram: Tensor  # Number of tokens per bin of d, int64.

    def __add__(self, other: Mismatch) -> Mismatch:
        if not self.tokens or not other.tokens:
            return self if self.tokens else other
        scale = _larger(self.scale, other.scale)
        mine, theirs = math.exp(self.scale - scale), math.exp(other.scale - scale)
        return Mismatch(
            tokens=self.tokens + other.tokens,
            exp_abs_sum=self.exp_abs_sum + other.exp_abs_sum,
            abs_sum=self.abs_sum + other.abs_sum,
            abs_max=_larger(self.abs_max, other.abs_max),
            k3_sum=self.k3_sum + other.k3_sum,
            scale=scale,
            w_sum=self.w_sum * mine + other.w_sum * theirs,
            w_square_sum=self.w_square_sum * mine**2 + other.w_square_sum * theirs**2,
            histogram=self.histogram + other.histogram,
        )

    def w_quantile(self, share: float) -> float:
        """The quantile ``share`` of ``w``, to 3.2 % of ``log w`` or 1e-8."""
        if not self.tokens:
            return 1.0
        below = torch.cumsum(self.histogram, 0)
        rank = max(1, math.ceil(share * int(below[-1])))
        at = int(torch.searchsorted(below, rank))
        # Bin i lies between edges i - 1 and i. The upper one is used, except across 0.
        if at == _magnitudes().numel():
            return 1.0
        return math.exp(float(_edges()[min(at, _edges().numel() - 1)]))

    def beyond(self, limit: float) -> tuple[int, float]:
        """Number of tokens whose ``|d|`` exceeds a limit, and the mean of ``exp(|d|)`` over the
        others, both rounded up by at most 3.2 % of ``d``.

        Args:
            limit: Limit in nats.
        """
        largest = _largest_in_bins()
        near = largest <= limit
        count = int(self.histogram[near].sum())
        total = float((self.histogram[near] * largest[near].exp()).sum())
        return self.tokens - count, total / count if count else 1.0

    def metrics(self) -> dict[str, float]:
        """Numbers to log; without tokens, those of perfect agreement.

        ``effective_sample_size`` is ``(sum w)^2 / sum w^2`` as a share of the tokens (Kish), 1 if
        all weights are equal.
        """
        n = max(self.tokens, 1)
        empty = self.tokens == 0
        return {
            "mean_exp_abs_diff": 1.0 if empty else self.exp_abs_sum / n,
            "mean_abs_diff": self.abs_sum / n,
            "max_abs_diff": self.abs_max,
            "k3": self.k3_sum / n,
            "mean_w": 1.0 if empty else _exp(self.scale) * (self.w_sum / n),
            "p99_w": self.w_quantile(0.99),
            "effective_sample_size": 1.0 if empty else self.w_sum**2 / self.w_square_sum / n,
        }


def measure(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor | None = None
) -> Mismatch:
    """Compare two sets of log-probs of the same tokens.

    Args:
        trainer_log_probs: ``[R]``, in nats, at the sampling temperature, of the weights that
            sampled.
        engine_log_probs: ``[R]``, in nats.
        mask: ``[R]`` bool; false tokens are ignored. ``None``: all tokens.

    Raises:
        ValueError: Shapes do not match.
    """
    if trainer_log_probs.shape != engine_log_probs.shape:
        raise ValueError(
            f"{trainer_log_probs.numel()} log-probs of the trainer, but "
            f"{engine_log_probs.numel()} of the engine"
        )
    if trainer_log_probs.numel() > CHUNK_TOKENS:
        chunks = zip(
            trainer_log_probs.split(CHUNK_TOKENS),
            engine_log_probs.split(CHUNK_TOKENS),
            repeat(None) if mask is None else mask.split(CHUNK_TOKENS),
            strict=False,
        )
        return reduce(add, (measure(*chunk) for chunk in chunks))
    d = trainer_log_probs.detach().double() - engine_log_probs.detach().double()
    if mask is not None:
        d = d[mask]
    d = d.cpu()
    size, scale = d.abs(), float(d.max()) if d.numel() else 0.0
    w = (d - scale).exp()
    return Mismatch(
        tokens=d.numel(),
        exp_abs_sum=float(size.exp().sum()),
        abs_sum=float(size.sum()),
        abs_max=float(size.max()) if d.numel() else 0.0,
        k3_sum=float((torch.expm1(d) - d).sum()),
        scale=scale,
        w_sum=float(w.sum()),
        w_square_sum=float(w.square().sum()),
        histogram=torch.bincount(_bins(d, size), minlength=_edges().numel() + 1),
    )


def _bins(d: Tensor, size: Tensor) -> Tensor:
    """``[n]`` int64, the bin of each ``d``; NaN is in the last one. ``size``: ``|d|``."""
    last = _LEVELS + 1
    level = (size.view(torch.int64) >> (52 - _BITS)).sub_(_FIRST - 1).clamp_(0, last)
    return torch.where(d < 0, -level, level).add_(last)


def measure_by_lag(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, lags: Tensor, mask: Tensor | None = None
) -> dict[int, Mismatch]:
    """``measure`` separately for the tokens of each lag.

    Args:
        trainer_log_probs: ``[R]``, in nats.
        engine_log_probs: ``[R]``, in nats.
        lags: ``[R]`` int64, weights versions between sampling and training.
        mask: ``[R]`` bool; false tokens are ignored.
    """
    found: list[int] = torch.unique(lags).tolist()
    if len(found) == 1:
        return {found[0]: measure(trainer_log_probs, engine_log_probs, mask)}
    keep = torch.ones_like(lags, dtype=torch.bool) if mask is None else mask
    return {
        lag: measure(trainer_log_probs, engine_log_probs, keep & (lags == lag)) for lag in found
    }


def _exp(x: float) -> float:
    """``e^x``, or infinity on overflow."""
    return math.exp(x) if not x > 709.0 else math.inf


def _larger(a: float, b: float) -> float:
    """The larger one; NaN wins."""
    return a if math.isnan(a) or a > b else b
