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
    # Action of a collapse detector. log: a line in decisions.jsonl; warn: also on the terminal;
    # stop: end the run; rollback: return to the last checkpoint before the collapse and continue
    # with a lower learning rate.
    action: CollapseAction = CollapseAction.warn
    # Detectors that stop the run regardless of action, such as [mismatch_k3].
    stop_on: list[str] = field(default_factory=list)
    # Detectors that roll the run back regardless of action, such as [length_drift].
    rollback_on: list[str] = field(default_factory=list)
    # Consecutive steps beyond the threshold before a detector fires.
    patience_steps: int = 3
    # Number of first steps whose median is the baseline of drift detectors.
    baseline_steps: int = 10
    # Factor of the learning rate at each rollback.
    rollback_lr_factor: float = 0.5
    # Maximum number of rollbacks of a run; then it stops.
    max_rollbacks: int = 2
    # The remaining settings are the detectors' thresholds; null turns a detector off. Maximum
    # fraction of repetitive responses.
    repetition: float | None = 0.3
    # Maximum fraction of truncated responses.
    truncated: float | None = 0.7
    # Maximum fraction of groups in which all responses are truncated.
    truncated_groups: float | None = 0.5
    # Minimum entropy, in nats.
    entropy_low: float | None = 0.01
    # Maximum entropy, as a multiple of its baseline.
    entropy_high: float | None = 4.0
    # Maximum factor between the mean response length and its baseline, in either direction.
    length_drift: float | None = 4.0
    # Maximum fraction of groups with equal rewards.
    equal_rewards: float | None = 0.95
    # Maximum trainer-engine mismatch (k3), in nats.
    mismatch_k3: float | None = 0.1
    # Minimum effective sample size of the trainer-engine mismatch, as a fraction.
    mismatch_ess: float | None = 0.3
    # Maximum gradient norm, as a multiple of its recent median.
    grad_norm: float | None = 20.0
    # Maximum drop of the mean reward from its best, in standard errors.
    reward_fall: float | None = 6.0


@dataclass
class WatchdogConfig:
    # If there is no progress for this many seconds (no token, grade, answer of a rank or new
    # phase), report what the run is waiting on and restart it; null: wait forever. Must exceed the
    # longest update.
    stall_s: float | None = 3600.0


# Names of the settings that are thresholds.
DETECTORS = tuple(one.name for one in fields(CollapseConfig) if str(one.type).startswith("float |"))
