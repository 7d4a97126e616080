"""PPO's value model in a training step: its update and how well it predicted the returns."""

from __future__ import annotations

from rlmath.actor.rank_step import Moments, ValueResult


def value_metrics(result: ValueResult) -> dict[str, float]:
    """``value/...`` of an update of the value model."""
    minibatches = result.minibatches
    metrics = {
        f"value/{name}": sum(one[name] for one in minibatches) / len(minibatches)
        for name in minibatches[0]
        if name not in ("discarded", "lr")
    }
    metrics["value/lr"] = minibatches[-1]["lr"]
    metrics["value/discarded_minibatches"] = sum(one["discarded"] for one in minibatches)
    return metrics | _fit_metrics(result.moments)


def _fit_metrics(moments: Moments) -> dict[str, float]:
    """How well the values from before the update predicted the returns."""
    count = moments.count
    if not count:
        return {}
    mean = moments.return_sum / count
    # Rounding may leave a tiny negative number.
    spread = max(moments.return_square_sum / count - mean**2, 0.0)
    left = max(moments.error_square_sum / count - (moments.error_sum / count) ** 2, 0.0)
    # Returns that are all equal differ by rounding alone.
    equal = spread <= 1e-14 * moments.return_square_sum / count
    return {
        "value/mean": moments.value_sum / count,
        "value/return_mean": mean,
        "value/explained_variance": float("nan") if equal else 1.0 - left / spread,
    }
