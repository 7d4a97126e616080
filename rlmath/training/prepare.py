"""From the groups of a step to shards on the ranks that are ready for the update.

The driver deals the sequences and holds what is one number a sequence. Passes over the shards add
log-probs, values and correction factors on the ranks, and the advantages come once, at the end,
from everything that they depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import DistillSettings, GaeSettings, TokenSettings
from rlmath.algorithms.advantages import SequenceAdvantages, needs_value_model, sequence_advantages
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import CorrectionConfig
from rlmath.batching.from_groups import estimator_rewards
from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config, OldLogProbs
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import advantage_settings, update_settings
from rlmath.training.metrics import batch_metrics
from rlmath.training.mismatch import choose_correction, correction_metrics, mismatch_metrics
from rlmath.training.session import Session
from rlmath.training.step_batch import StepBatch
from rlmath.weights.sequence_fingerprints import SequenceFingerprints


@dataclass(frozen=True)
class Prepared:
    """Sequences whose shards are ready for the update.

    Attributes:
        batch: Of the step.
        metrics: Sizes, alignment, mismatch, correction and distillation.
        any_advantage: Whether any token's advantage is not 0.
        fingerprints: Of what the update reads of each sequence.
        alignment: Of the old log-probs and the rollout log-probs; ``None``: no pass before the
            update has computed the former.
    """

    batch: StepBatch
    metrics: dict[str, float]
    any_advantage: bool
    fingerprints: SequenceFingerprints
    alignment: Alignment | None = None

    @property
    def entropy(self) -> float | None:
        """Mean over the tokens of the loss before the update, in nats; ``None``: see alignment."""
        return None if self.alignment is None else self.alignment.entropy


def prepare(
    session: Session,
    batch: StepBatch,
    plan: StepPlan,
    kl_coef: float,
    monitor: Monitor,
    step: int,
    once_dealt: Callable[[], object] = lambda: None,
) -> Prepared:
    """Deal a step's sequences, run the passes before its update, and compute its advantages.

    Args:
        kl_coef: This step's weight of a KL in the reward.
        once_dealt: Called when the ranks have their sequences.
    """
    config, actor, sequences = session.config, session.actor, batch.sequences
    alignment = None
    with monitor.phase("advantage"):
        metrics = batch_metrics(sequences)
        # The shares depend on none of the coefficients.
        actor.begin_step(sequences, update_settings(config, 0.0, 0.0), config.runner.seed + step)
    once_dealt()
    with monitor.phase("log_probs"):
        if plan.old_log_probs or plan.reference or plan.values:
            alignment = actor.step_passes(plan, batch.weights_version)
            metrics |= mismatch_metrics(alignment)
    with monitor.phase("advantage"):
        correction = None
        if config.algorithm.correction.is_on:
            assert alignment is not None
            given = config.algorithm.correction
            correction = choose_correction(given, alignment.loss, monitor, step)
        settings = token_settings(config, kl_coef, correction)
        advantages = None
        if settings.gae is None:
            advantages = rewards_to_advantages(config, batch)
        found = actor.step_finish(settings, advantages)
    metrics |= correction_metrics(settings.correction, found.correction)
    if found.distill is not None:
        metrics |= {f"distill/{name}": x for name, x in found.distill.metrics().items()}
    return Prepared(batch, metrics, found.any_advantage, found.fingerprints, alignment)


def token_settings(
    config: Config, kl_coef: float, correction: CorrectionConfig | None
) -> TokenSettings:
    """What the ranks compute between the log-probs and the update.

    Args:
        kl_coef: This step's weight of a KL in the reward.
        correction: With ``auto`` resolved; ``None``: none.
    """
    algorithm, value = config.algorithm, config.value
    gae = None
    if needs_value_model(algorithm.advantage):
        gae = GaeSettings(algorithm.advantage, value.gamma, value.lam, value.whiten_advantages)
    distill = None
    if algorithm.distill_coef > 0:
        distill = DistillSettings(algorithm.distill_coef, algorithm.distill_clip)
    return TokenSettings(
        old_is_engine=algorithm.old_log_probs is OldLogProbs.engine,
        correction=correction,
        entropy_top_share=algorithm.entropy_top_share,
        kl_coef=kl_coef if algorithm.kl_in is KlPlace.reward else None,
        gae=gae,
        distill=distill,
    )


def rewards_to_advantages(config: Config, batch: StepBatch) -> SequenceAdvantages:
    """The advantages of the sequences, from rewards alone."""
    settings = advantage_settings(config, batch.rewards.weights)
    return sequence_advantages(
        estimator_rewards(batch.rewards, settings),
        batch.sequences.group_ids,
        batch.sequences.loss_token_counts,
        settings,
        token_rewards=config.algorithm.kl_in is KlPlace.reward,
    )
