"""The plan of a training step, from the settings and the step's number."""

from __future__ import annotations

import dataclasses

from rlmath.actor.plan import StepPlan
from rlmath.algorithms.advantages import needs_value_model
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.config.actor import RoutingReplay
from rlmath.config.algorithm import KlPlace, needs_old_log_probs
from rlmath.config.options import AGGREGATION_OPTIONS, KL_OPTIONS, LOSS_OPTIONS
from rlmath.config.rollout import keeps_kv
from rlmath.config.schema import Config, OldLogProbs
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import aggregation_constant
from rlmath.training.controllers import Coefficients
from rlmath.training.mismatch import choose_correction


def plan_step(config: Config, step: int, kl_coef: float | None = None) -> StepPlan:
    """The plan of a step, counted from 1. ``kl_coef``: KL coefficient of this step; ``None``: the
    setting's."""
    algorithm, value = config.algorithm, config.value
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    every, mismatch_every = config.alignment.every, config.actor.routing_mismatch_every
    values = needs_value_model(algorithm.advantage)
    # The gate comes before anything is learned.
    first_gate = step == 1 and every > 0
    stale_kv = keeps_kv(config.rollout)
    passes = {
        "old": needs_old_log_probs(algorithm) or first_gate or stale_kv,
        "reference": algorithm.kl_coef > 0,
        "values": values,
    }
    return StepPlan(
        objective=ObjectiveSettings(
            loss=algorithm.loss,
            options=LOSS_OPTIONS.of(config),
            kl_coef=kl_coef if algorithm.kl_in is KlPlace.loss else 0.0,
            kl_estimator=algorithm.kl_estimator,
            kl_options=KL_OPTIONS.of(config),
            entropy_coef=algorithm.entropy_coef,
            ratio_threshold=algorithm.early_stop_ratio or ObjectiveSettings.ratio_threshold,
            off_policy_mask_kl=algorithm.correction.off_policy_mask_kl,
        ),
        now=step - 1,
        passes=tuple(name for name, is_needed in passes.items() if is_needed),
        gate=first_gate or (every > 0 and step % every == 0),
        policy=not values or step > value.warmup_steps,
        stale_kv=stale_kv,
        minibatches=algorithm.minibatches_per_step,
        seed=config.runner.seed + step,
        aggregation=algorithm.aggregation,
        constant_length=aggregation_constant(config),
        aggregation_options=AGGREGATION_OPTIONS.of(config),
        old_is_engine=algorithm.old_log_probs is OldLogProbs.engine,
        correction=algorithm.correction if algorithm.correction.is_on else None,
        entropy_top_share=algorithm.entropy_top_share,
        kl_in_reward=kl_coef if algorithm.kl_in is KlPlace.reward else None,
        advantage=algorithm.advantage,
        gamma=value.gamma,
        lam=value.lam,
        whiten_advantages=value.whiten_advantages,
        distill_coef=algorithm.distill_coef,
        distill_clip=algorithm.distill_clip,
        early_stop_ratio=algorithm.early_stop_ratio,
        early_stop_rest=algorithm.early_stop_rest,
        routing_mismatch=config.actor.routing_replay is not RoutingReplay.none
        and mismatch_every > 0
        and (step - 1) % mismatch_every == 0,
        value_clip=value.clip,
    )


def complete(
    plan: StepPlan,
    alignment: Alignment | None,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
) -> StepPlan:
    """The plan with what the forward passes over the whole step decide: the correction that
    ``auto`` chooses, and the entropy coefficient."""
    correction = plan.correction
    if correction is not None:
        assert alignment is not None
        correction = choose_correction(correction, alignment.loss, monitor, step)
    entropy_coef = coefficients.entropy_coef
    if plan.policy:  # Nothing answers to it while the value model is trained alone.
        entropy = None if alignment is None else alignment.entropy
        entropy_coef = coefficients.entropy_coef_at(entropy)
    objective = dataclasses.replace(plan.objective, entropy_coef=entropy_coef)
    return dataclasses.replace(plan, correction=correction, objective=objective)
