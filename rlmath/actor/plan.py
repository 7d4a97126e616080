"""What ranks are told of a step before they compute anything of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """The forward passes of a step and what is updated, decided once before the step begins.

    Attributes:
        old_log_probs: Compute the actor's log-probs before the first update. Without this pass,
            those of the first minibatch come with its update.
        gate: Fail the run, or warn, when actor and engines disagree on the log-probs.
        reference: Compute the reference model's log-probs.
        values: Compute values before the update, and train the value model.
        policy: Update the policy; not while the value model warms up.
        stale_kv: Engines keep keys and values of older weights; see ``Alignment.of``.
    """

    old_log_probs: bool
    gate: bool
    reference: bool
    values: bool
    policy: bool
    stale_kv: bool = False
