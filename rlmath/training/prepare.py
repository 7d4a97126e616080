"""From the groups of a step to the batch that its update trains on.

The batch is built without advantages. Passes over it add log-probs, values and correction factors,
and the advantages come once, at the end, from everything that they depend on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.advantages import gae, token_advantages
from rlmath.algorithms.advantages.whiten import whiten
from rlmath.algorithms.entropy import top_entropy_mask
from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.batching.from_groups import estimator_rewards, training_batch
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config, OldLogProbs
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import advantage_settings
from rlmath.training.metrics import batch_metrics
from rlmath.training.mismatch import apply_correction, check_mismatch
from rlmath.training.passes import Passes
from rlmath.training.session import Session
from rlmath.types import Group, TrainingBatch


@dataclass(frozen=True)
class Prepared:
    """A batch that is ready for the update.

    Attributes:
        batch: With advantages and all that the step's passes compute.
        metrics: Sizes, alignment, mismatch and correction.
        entropy: Mean entropy of the tokens of the loss before the update, in nats; ``None``
            without a pass for the old log-probs.
    """

    batch: TrainingBatch
    metrics: dict[str, float]
    entropy: float | None = None


def prepare(
    session: Session,
    groups: Sequence[Group],
    passes: Passes,
    kl_coef: float,
    monitor: Monitor,
    step: int,
) -> Prepared:
    """Build a step's batch, run the passes before its update, and compute its advantages.

    Args:
        kl_coef: This step's weight of a KL in the reward.

    Raises:
        AlignmentError: Engine and actor disagree; see :func:`check_mismatch`.
    """
    with monitor.phase("advantage"):
        batch = build_batch(session.config, groups)
        metrics = batch_metrics(batch)
    with monitor.phase("log_probs"):
        batch, entropies, mismatch = add_log_probs(session, batch, passes, monitor, step)
        batch, correction = add_policy_factors(session.config, batch, entropies, monitor, step)
        if passes.values:
            batch = dataclasses.replace(batch, values=session.actor.values(batch))
    with monitor.phase("advantage"):
        batch = add_advantages(session, batch, groups, kl_coef)
    entropy = None if entropies is None else float(entropies[batch.loss_mask].mean())
    return Prepared(batch, metrics | mismatch | correction, entropy)


def build_batch(config: Config, groups: Sequence[Group]) -> TrainingBatch:
    """The samples of all groups, without advantages."""
    algorithm = config.algorithm
    return training_batch(
        groups,
        truncated=algorithm.truncated,
        mask_duplicates=algorithm.filter.mask_duplicates,
    )


def add_log_probs(
    session: Session, batch: TrainingBatch, passes: Passes, monitor: Monitor, step: int
) -> tuple[TrainingBatch, Tensor | None, dict[str, float]]:
    """Add the log-probs of the old policy and the reference.

    Returns:
        The batch, the actor's entropies ``[R]`` in nats if they were computed, and the mismatch
        metrics.
    """
    old = entropies = reference = None
    metrics: dict[str, float] = {}
    if passes.old_log_probs:
        old, entropies = session.actor.log_probs(batch)
        metrics = check_mismatch(session, old, batch, monitor, step, gate=passes.gate)
    if session.config.algorithm.old_log_probs is OldLogProbs.engine:
        old = batch.engine_log_probs
    if passes.reference:
        reference, _ = session.actor.log_probs(batch, reference=True)
    batch = dataclasses.replace(batch, old_log_probs=old, ref_log_probs=reference)
    return batch, entropies, metrics


def add_policy_factors(
    config: Config, batch: TrainingBatch, entropies: Tensor | None, monitor: Monitor, step: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """Add the factors of the policy term: mismatch correction and top entropy.

    Args:
        entropies: ``[R]`` in nats; needed with ``entropy_top_share``.

    Returns:
        The batch and ``correction/...``.
    """
    algorithm = config.algorithm
    batch, metrics = apply_correction(batch, algorithm.correction, monitor, step)
    if algorithm.entropy_top_share < 1:
        assert entropies is not None
        keep = top_entropy_mask(entropies, batch.loss_mask, algorithm.entropy_top_share).float()
        factors = keep if batch.policy_factors is None else keep * batch.policy_factors
        batch = dataclasses.replace(batch, policy_factors=factors)
    return batch, metrics


def add_advantages(
    session: Session, batch: TrainingBatch, groups: Sequence[Group], kl_coef: float
) -> TrainingBatch:
    """Add the advantages, from rewards, a KL in the reward, and values where there are any.

    Args:
        batch: With values for an estimator that needs them, and with old and reference log-probs
            for a KL in the reward.
        kl_coef: This step's weight of a KL in the reward.
    """
    config = session.config
    kl = None
    if config.algorithm.kl_in is KlPlace.reward:
        old, reference = batch.old_log_probs, batch.ref_log_probs
        assert old is not None and reference is not None
        kl = kl_estimate("k1", old, reference, old)
    if batch.values is not None:
        return add_gae(config, batch, batch.values, kl, kl_coef)
    settings = advantage_settings(config, session.sampling.rewards)
    penalty = None
    if kl is not None:
        penalty = kl_coef * kl_in_reward(kl, batch.loss_mask, batch.response_lengths, 1.0)
    advantages = token_advantages(
        estimator_rewards(groups, settings),
        batch.group_ids,
        batch.response_lengths,
        batch.loss_mask,
        settings,
        penalty,
    )
    return dataclasses.replace(batch, advantages=advantages)


def add_gae(
    config: Config, batch: TrainingBatch, values: Tensor, kl: Tensor | None, kl_coef: float
) -> TrainingBatch:
    """Add advantages and returns from values.

    A sequence's reward is at its last token, also when the response was truncated: nothing is
    bootstrapped after it. A KL in the reward is a cost at each token.

    Args:
        values: ``[R]`` in units of the reward.
        kl: ``[R]`` in nats; ``None``: no KL in the reward.
    """
    rewards = torch.zeros_like(values)
    ends = torch.cumsum(batch.response_lengths, 0) - 1
    rewards[ends] = batch.rewards
    if kl is not None:
        rewards -= kl_coef * torch.where(batch.loss_mask, kl, 0.0)
    advantages, returns = gae(
        rewards,
        values,
        batch.response_lengths,
        gamma=config.value.gamma,
        lam=config.value.lam,
    )
    if config.value.whiten_advantages:
        advantages = whiten(advantages.double(), batch.loss_mask).float()
    return dataclasses.replace(batch, returns=returns, advantages=advantages)
