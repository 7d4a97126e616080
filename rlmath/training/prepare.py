"""What the update needs to know about the batch's tokens before it begins.

Log-probs of the old policy and of the reference, how far the engine is from the actor, and what
follows from these for each token: a correction's weight, a place in the loss, a KL penalty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.advantages import AdvantageSettings, token_advantages
from rlmath.algorithms.correction import CorrectionSettings, choose, correct
from rlmath.algorithms.entropy import top_entropy_mask
from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.algorithms.mismatch import Mismatch, measure, measure_by_lag
from rlmath.batching.from_groups import advantage_rewards
from rlmath.checks.facts import read_model
from rlmath.config.algorithm import CorrectionKind, KlPlace
from rlmath.config.schema import AlgorithmConfig, Config, DType, OldLogProbs, OnMisalignment
from rlmath.errors import UserError
from rlmath.model.precision import log_prob_limit
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import correction_settings
from rlmath.training.session import Session
from rlmath.types import Group, TrainingBatch

# Of a Mismatch's figures, those that say how much importance weights would do.
_WEIGHTS = ("mean_w", "p99_w", "k3", "effective_sample_size")


class AlignmentError(UserError):
    """Engine and actor disagree on the log-probs of the same tokens under the same weights."""


@dataclass(frozen=True)
class Prepared:
    """A batch with what the update needs to know.

    Attributes:
        batch: With old and reference log-probs, as far as the algorithm needs them.
        metrics: What was measured on the way.
        entropy: Mean entropy of the tokens of the loss, in nats, where it was taken.
        kl_rewards: ``[R]`` what the KL takes from each token's return, before its weight: for a KL
            in the reward.
    """

    batch: TrainingBatch
    metrics: dict[str, float]
    entropy: float | None = None
    kl_rewards: Tensor | None = None


def with_log_probs(session: Session, batch: TrainingBatch, monitor: Monitor, step: int) -> Prepared:
    """Log-probs of the old policy and the reference, and what follows from them.

    When nothing needs the actor's log-probs earlier (a single minibatch, or the engine's in their
    place) those of the first minibatch come with its update, which saves a forward pass.
    """
    actor, algorithm = session.actor, session.config.algorithm
    metrics: dict[str, float] = {}
    mean_entropy = None
    old = entropy = reference = kl_rewards = None
    if passes_first(session.config, step):
        old, entropy = actor.log_probs(batch)
        metrics |= compared(session, old, batch, monitor, step)
        mean_entropy = float(entropy[batch.loss_mask].mean())
    if algorithm.old_log_probs is OldLogProbs.engine:
        old = batch.engine_log_probs
    if algorithm.kl_coef > 0:
        reference, _ = actor.log_probs(batch, reference=True)
    batch = dataclasses.replace(batch, old_log_probs=old, ref_log_probs=reference)
    if algorithm.kl_in is KlPlace.reward:
        assert old is not None and reference is not None
        kl_rewards = kl_in_reward(
            kl_estimate("k1", old, reference, old), batch.loss_mask, batch.response_lengths, 1.0
        )
    batch, more = corrected(batch, correction_settings(algorithm), monitor, step)
    if algorithm.entropy_top_share < 1:
        assert entropy is not None
        keep = top_entropy_mask(entropy, batch.loss_mask, algorithm.entropy_top_share).float()
        factors = keep if batch.policy_factors is None else keep * batch.policy_factors
        batch = dataclasses.replace(batch, policy_factors=factors)
    return Prepared(batch, metrics | more, mean_entropy, kl_rewards)


def with_kl_rewards(
    prepared: Prepared, groups: Sequence[Group], advantage: AdvantageSettings, kl_coef: float
) -> TrainingBatch:
    """The batch with a KL in the reward, if it belongs there, in the advantages of its tokens."""
    batch = prepared.batch
    if prepared.kl_rewards is None:
        return batch
    samples = [sample for group in groups for sample in group.samples]
    advantages = token_advantages(
        advantage_rewards(samples, advantage),
        batch.group_ids,
        batch.response_lengths,
        batch.loss_mask,
        advantage,
        kl_coef * prepared.kl_rewards,
    )
    return dataclasses.replace(batch, advantages=advantages)


def passes_first(config: Config, step: int) -> bool:
    """Whether log-probs are taken before this step's update: when the algorithm needs them, and in
    the first step for the gate, which is to stand before anything is learnt."""
    return needs_first_pass(config.algorithm) or (step == 1 and config.alignment.every > 0)


def needs_first_pass(algorithm: AlgorithmConfig) -> bool:
    """Whether the actor's log-probs have to be known before the first update."""
    correction = algorithm.correction
    corrects = correction.kind is not CorrectionKind.none or correction.veto_below is not None
    needs_entropy = algorithm.entropy_target is not None or algorithm.entropy_top_share < 1
    recomputes = algorithm.old_log_probs is OldLogProbs.recompute
    earlier = algorithm.minibatches_per_step > 1 or algorithm.kl_in is KlPlace.reward
    return corrects or needs_entropy or (recomputes and earlier)


def corrected(
    batch: TrainingBatch, settings: CorrectionSettings, monitor: Monitor, step: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """The batch with weights against the mismatch; they come from whole sequences, before any cut.

    ``auto`` writes down which kind it took, and why.
    """
    if settings.kind == "none" and settings.veto_below is None:
        return batch, {}
    assert batch.old_log_probs is not None
    if settings.kind == "auto":
        seen = measure(batch.old_log_probs, batch.engine_log_probs, batch.loss_mask)
        kind, reason = choose(seen)
        monitor.note(step, "algorithm.correction.kind=auto", kind, reason)
        settings = dataclasses.replace(settings, kind=kind)
    found = correct(
        batch.old_log_probs,
        batch.engine_log_probs,
        batch.loss_mask,
        batch.response_lengths,
        settings,
    )
    metrics = {f"correction/{name}": value for name, value in found.metrics.items()}
    metrics["correction/kind"] = float(KIND_NUMBERS[found.kind])
    if settings.kind == "none" and settings.veto_below is None:
        return batch, metrics
    return dataclasses.replace(batch, policy_factors=found.weights.float()), metrics


# A curve holds numbers: the kinds in the order of the settings, ``none`` 0.
KIND_NUMBERS = {
    kind: number
    for number, kind in enumerate(k.value for k in CorrectionKind if k is not CorrectionKind.auto)
}


def compared(
    session: Session, log_probs: Tensor, batch: TrainingBatch, monitor: Monitor, step: int
) -> dict[str, float]:
    """The gate (:func:`aligned`) and the mismatch, overall and by the age of the weights."""
    config, now = session.config, session.sampling.pool.weights_version
    due = config.alignment.every > 0 and (step == 1 or step % config.alignment.every == 0)
    try:
        alignment = aligned(config, log_probs, batch, now, judge=due)
    except AlignmentError as error:
        if config.alignment.on_fail is OnMisalignment.stop:
            raise
        monitor.warn(f"step {step}: {error}")
        alignment = aligned(config, log_probs, batch, now, judge=False)
    if batch.loss_mask.all() and (batch.weights_versions == now).all():
        # The same tokens: tens of millions of them are not looked at twice.
        return alignment | {f"mismatch/{name}": alignment[f"alignment/{name}"] for name in _WEIGHTS}
    return alignment | mismatch_metrics(log_probs, batch, now)


def mismatch_metrics(log_probs: Tensor, batch: TrainingBatch, now: int) -> dict[str, float]:
    """How much importance weights would do on the tokens of the loss.

    Args:
        log_probs: ``[R]`` of the actor, before the update.
        batch: With the engine's.
        now: The weights version of the actor; samples of older ones lag behind.
    """
    lags = now - batch.weights_versions
    by_lag = measure_by_lag(
        log_probs, batch.engine_log_probs, batch.response_lengths, lags, batch.loss_mask
    )
    total: Mismatch | None = None
    for one in by_lag.values():
        total = one if total is None else total + one
    assert total is not None
    found = total.metrics()
    metrics = {f"mismatch/{name}": found[name] for name in _WEIGHTS}
    if set(by_lag) != {0}:
        for lag, one in by_lag.items():
            found = one.metrics()
            metrics |= {f"mismatch/lag_{lag}/{name}": found[name] for name in _WEIGHTS}
            metrics[f"mismatch/lag_{lag}/token_count"] = float(one.tokens)
    return metrics


def aligned(
    config: Config, log_probs: Tensor, batch: TrainingBatch, now: int, judge: bool
) -> dict[str, float]:
    """How far engine and actor are apart on the tokens that the engine sampled with these weights.

    Tokens sampled by older weights differ for a good reason and are left out.

    Args:
        judge: Whether being further apart than the limit ends the run.

    Raises:
        AlignmentError: It does, and they are.
    """
    same = torch.repeat_interleave(batch.weights_versions == now, batch.response_lengths)
    if not same.any():
        return {}
    metrics = measure(log_probs, batch.engine_log_probs, same).metrics()
    if judge and not metrics["mean_exp_abs_diff"] <= (limit := alignment_limit(config)):
        apart = torch.where(same, (log_probs - batch.engine_log_probs).abs(), -1.0)
        worst = int(apart.nan_to_num(torch.inf).argmax())
        sequence = int((torch.cumsum(batch.response_lengths, 0) <= worst).sum())
        raise AlignmentError(
            f"mean exp|logp_actor - logp_engine| is {metrics['mean_exp_abs_diff']:.4f} over "
            f"{int(same.sum())} tokens, above {limit:g} (alignment.max_mean_exp_abs_diff; by "
            f"default that of model.dtype={config.model.dtype.value}); worst at response token "
            f"{worst}, in sequence {sequence} of the batch: actor {float(log_probs[worst]):.4f}, "
            f"engine {float(batch.engine_log_probs[worst]):.4f}. The engine runs other weights or "
            "another precision than the actor, so training on its samples would be wrong. "
            "toolkits/validate_logprobs.py names the first layer that differs; "
            "alignment.on_fail=warn goes on all the same"
        )
    return {f"alignment/{name}": value for name, value in metrics.items()}


def alignment_limit(config: Config) -> float:
    """Largest mean of exp|difference| that is taken for the same model, from the settings."""
    given = config.alignment.max_mean_exp_abs_diff
    if given is not None:
        return given
    mixture = read_model(config.model.path).num_experts > 0
    return log_prob_limit(config.model.dtype is DType.float32, mixture)
