"""PPO's value model in a training step: its update and how well it predicted the returns."""

from __future__ import annotations

from rlmath.actor.rank_step import Moments
from rlmath.actor.settings import ValueUpdateSettings
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import aggregation_constant
from rlmath.training.checks.unchanged import check_value_changes
from rlmath.training.digests import digest_values
from rlmath.training.session import Session


def update_values(session: Session, monitor: Monitor, step: int) -> dict[str, float]:
    """Optimizer steps of the value model, as many as the policy's, from the ranks' shards.

    Returns:
        ``value/...``.

    Raises:
        InvariantError: A matrix did not change, with ``alignment.on_fail=stop``.
    """
    config = session.config
    settings = ValueUpdateSettings(
        clip=config.value.clip,
        aggregation=config.algorithm.aggregation,
        constant_length=aggregation_constant(config),
        minibatches=config.algorithm.minibatches_per_step,
    )
    minibatches, moments, prints, unchanged = session.actor.step_update_values(settings)
    digest_values(monitor.digests, minibatches, prints)
    metrics = {
        f"value/{name}": sum(one[name] for one in minibatches) / len(minibatches)
        for name in minibatches[0]
        if name not in ("discarded", "lr")
    }
    metrics["value/lr"] = minibatches[-1]["lr"]
    metrics["value/discarded_minibatches"] = sum(one["discarded"] for one in minibatches)
    # Before its first update the head is 0, and nothing below it has a gradient.
    if moments.value_sum:
        check_value_changes(config, unchanged, metrics, step, monitor)
    return metrics | _fit_metrics(moments)


def _fit_metrics(moments: Moments) -> dict[str, float]:
    """How well the values from before the update predicted the returns."""
    count = moments.count
    if not count:
        return {}
    mean = moments.return_sum / count
    # Rounding may leave a little less than nothing.
    spread = max(moments.return_square_sum / count - mean**2, 0.0)
    left = max(moments.error_square_sum / count - (moments.error_sum / count) ** 2, 0.0)
    # Returns that are all equal differ by rounding alone.
    equal = spread <= 1e-14 * moments.return_square_sum / count
    return {
        "value/mean": moments.value_sum / count,
        "value/return_mean": mean,
        "value/explained_variance": float("nan") if equal else 1.0 - left / spread,
    }
