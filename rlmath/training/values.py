"""PPO's value model in a training step: values before the update, advantages, its own update."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlmath.actor.settings import ValueUpdateSettings
from rlmath.algorithms.advantages import gae
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.algorithms.kl import kl_estimate
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config
from rlmath.training.algorithm_settings import aggregation_constant
from rlmath.training.session import GAE, Session
from rlmath.types import TrainingBatch


def with_values(session: Session, batch: TrainingBatch, kl_coef: float) -> TrainingBatch:
    """The batch with values, returns and, from these, advantages; unchanged without a value model.

    A sequence's reward stands at its last token; a response that was cut off is worth its reward
    as well, and nothing beyond. A KL in the reward costs at each token.

    Args:
        batch: With old and reference log-probs when the KL is in the reward.
        kl_coef: Of this step.
    """
    config = session.config
    if config.algorithm.advantage != GAE:
        return batch
    values = session.actor.values(batch)
    rewards = torch.zeros_like(values)
    ends = torch.cumsum(batch.response_lengths, 0) - 1
    rewards[ends] = batch.rewards
    if config.algorithm.kl_in is KlPlace.reward and kl_coef:
        old, reference = batch.old_log_probs, batch.ref_log_probs
        assert old is not None and reference is not None
        cost = kl_estimate("k1", old, reference, old)
        rewards -= kl_coef * torch.where(batch.loss_mask, cost, 0.0)
    advantages, returns = gae(
        rewards,
        values,
        batch.response_lengths,
        gamma=config.value.gamma,
        lam=config.value.lam,
    )
    if config.value.whiten_advantages:
        advantages = whiten(advantages.double(), batch.loss_mask).float()
    return dataclasses.replace(batch, values=values, returns=returns, advantages=advantages)


def train_values(session: Session, batch: TrainingBatch, step: int) -> dict[str, float]:
    """Optimizer steps of the value model, as many as the policy's; nothing without one."""
    config = session.config
    if batch.values is None or batch.returns is None:
        return {}
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
    return metrics | _fit(batch.values[mask].double(), batch.returns[mask].double())


def _fit(values: Tensor, returns: Tensor) -> dict[str, float]:
    """How well the values of before the update foretold the returns."""
    if not values.numel():
        return {}
    spread = float(returns.var(correction=0))
    left = float((returns - values).var(correction=0))
    return {
        "value/mean": float(values.mean()),
        "value/return_mean": float(returns.mean()),
        "value/explained_variance": 1.0 - left / spread if spread > 0 else float("nan"),
    }


def only_values_learn(config: Config, step: int) -> bool:
    """Whether the policy rests in this step, while the value model finds its level."""
    return config.algorithm.advantage == GAE and step <= config.value.warmup_steps
