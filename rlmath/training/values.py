"""PPO's value model in a training step: its update and how well it predicted the returns."""

from __future__ import annotations

from torch import Tensor

from rlmath.actor.settings import ValueUpdateSettings
from rlmath.training.algorithm_settings import aggregation_constant
from rlmath.training.session import Session
from rlmath.types import TrainingBatch


def update_values(session: Session, batch: TrainingBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the value model, as many as the policy's.

    Args:
        batch: With values and returns.

    Returns:
        ``value/...``.
    """
    config = session.config
    assert batch.values is not None and batch.returns is not None
    settings = ValueUpdateSettings(
        clip=config.value.clip,
        aggregation=config.algorithm.aggregation,
        constant_length=aggregation_constant(config),
        minibatches=config.algorithm.minibatches_per_step,
    )
    minibatches = session.actor.update_values(batch, settings, config.runner.seed + step)
    metrics = {
        f"value/{name}": sum(one[name] for one in minibatches) / len(minibatches)
        for name in minibatches[0]
        if name not in ("discarded", "lr")
    }
    metrics["value/lr"] = minibatches[-1]["lr"]
    metrics["value/discarded_minibatches"] = sum(one["discarded"] for one in minibatches)
    mask = batch.loss_mask
    return metrics | _fit_metrics(batch.values[mask].double(), batch.returns[mask].double())


def _fit_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """How well the values from before the update predicted the returns."""
    if not values.numel():
        return {}
    spread = float(returns.var(correction=0))
    left = float((returns - values).var(correction=0))
    return {
        "value/mean": float(values.mean()),
        "value/return_mean": float(returns.mean()),
        "value/explained_variance": 1.0 - left / spread if spread > 0 else float("nan"),
    }
