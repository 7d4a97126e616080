"""Settings of what watches a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum


class CollapseAction(Enum):
    """What a collapse detector does when it fires; each does what the ones before it do."""

    log = "log"
    warn = "warn"
    stop = "stop"
    rollback = "rollback"


@dataclass
class CollapseConfig:
    # What a detector does when it fires. log: a line in decisions.jsonl; warn: one in the terminal
    # as well; stop: end the run; rollback: go back to the last checkpoint before the collapse and
    # on with a lower learning rate.
    action: CollapseAction = CollapseAction.warn
    # Detectors that stop the run, whatever action says; such as [mismatch_k3].
    stop_on: list[str] = field(default_factory=list)
    # Detectors that roll the run back, whatever action says; such as [length_drift].
    rollback_on: list[str] = field(default_factory=list)
    # Steps in a row that have to pass a threshold before its detector fires.
    patience_steps: int = 3
    # Steps, from the run's first, whose median is what drifts are measured from.
    baseline_steps: int = 10
    # What a rollback multiplies the learning rate with.
    rollback_lr_factor: float = 0.5
    # Rollbacks in the life of a run; at the next one it stops.
    max_rollbacks: int = 2
    # The rest are the detectors' thresholds; null turns one off. Share of responses that repeat
    # themselves.
    repetition: float | None = 0.3
    # Share of responses that are cut off.
    truncated: float | None = 0.7
    # Share of groups all of whose responses are cut off.
    truncated_groups: float | None = 0.5
    # Least entropy, in nats.
    entropy_low: float | None = 0.01
    # Entropy, as a multiple of its baseline.
    entropy_high: float | None = 4.0
    # Mean length of responses, as a multiple of its baseline or a fraction 1/threshold of it.
    length_drift: float | None = 4.0
    # Share of groups with equal rewards.
    equal_rewards: float | None = 0.95
    # Mismatch of engine and actor: k3, in nats.
    mismatch_k3: float | None = 0.1
    # Mismatch of engine and actor: least effective sample size, as a share.
    mismatch_ess: float | None = 0.3
    # Norm of the gradient, as a multiple of its recent median.
    grad_norm: float | None = 20.0
    # Fall of the mean reward from its best, in standard errors.
    reward_fall: float | None = 6.0


@dataclass
class WatchdogConfig:
    # Seconds in which nothing gets on (no token, no grade, no answer of a rank, no new phase)
    # after which the run says what it waits for and starts again; null: wait for ever. Longer
    # than the longest update.
    stall_s: float | None = 3600.0


# Names of the settings that are thresholds.
DETECTORS = tuple(one.name for one in fields(CollapseConfig) if str(one.type).startswith("float |"))
