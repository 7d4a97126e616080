"""The plan of a training step, from the settings and the step's number."""

from __future__ import annotations

from rlmath.actor.plan import StepPlan
from rlmath.algorithms.advantages import needs_value_model
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.rollout import keeps_kv
from rlmath.config.schema import Config


def plan_step(config: Config, step: int) -> StepPlan:
    """The plan of a step, counted from 1."""
    algorithm, every = config.algorithm, config.alignment.every
    values = needs_value_model(algorithm.advantage)
    # The gate comes before anything is learned.
    first_gate = step == 1 and every > 0
    stale_kv = keeps_kv(config.rollout)
    return StepPlan(
        old_log_probs=needs_old_log_probs(algorithm) or first_gate or stale_kv,
        gate=first_gate or (every > 0 and step % every == 0),
        reference=algorithm.kl_coef > 0,
        values=values,
        policy=not values or step > config.value.warmup_steps,
        stale_kv=stale_kv,
    )
