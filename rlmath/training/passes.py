"""Which passes over its batch a training step makes."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.advantages import needs_value_model
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.rollout import keeps_kv
from rlmath.config.schema import Config


@dataclass(frozen=True)
class Passes:
    """The passes of one step, decided once before it begins.

    Attributes:
        old_log_probs: Compute the actor's log-probs before the first update. Without this pass,
            those of the first minibatch come with its update.
        gate: Fail the run, or warn, when actor and engines disagree on the log-probs.
        reference: Compute the reference model's log-probs.
        values: Compute values before the update, and train the value model.
        policy: Update the policy; not while the value model warms up.
    """

    old_log_probs: bool
    gate: bool
    reference: bool
    values: bool
    policy: bool

    @classmethod
    def of(cls, config: Config, step: int) -> Passes:
        """The passes of a step, counted from 1."""
        algorithm, every = config.algorithm, config.alignment.every
        values = needs_value_model(algorithm.advantage)
        # The gate comes before anything is learned.
        first_gate = step == 1 and every > 0
        return cls(
            old_log_probs=needs_old_log_probs(algorithm) or first_gate or keeps_kv(config.rollout),
            gate=first_gate or (every > 0 and step % every == 0),
            reference=algorithm.kl_coef > 0,
            values=values,
            policy=not values or step > config.value.warmup_steps,
        )
