"""Settings of ``collapse``: detectors of a collapsing policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from rlmath.utils.setting import setting

# Each includes the ones before it.
CollapseAction = StrEnum("CollapseAction", ["log", "warn", "stop", "rollback"])


@dataclass
class CollapseConfig:
    action: CollapseAction = setting(
        CollapseAction.warn,
        "Action of a collapse detector. log: a line in decisions.jsonl; warn: also on the "
        "terminal; stop: end the run; rollback: return to the last checkpoint before the collapse "
        "and continue with a lower learning rate.",
    )
    stop_on: list[str] = setting(
        lambda: ["unscored", "grading_failed", "sandbox_timeouts"],
        "Detectors that stop the run regardless of action, such as [unscored, mismatch_k3].",
    )
    rollback_on: list[str] = setting(
        list, "Detectors that roll the run back regardless of action, such as [length_drift]."
    )
    patience_steps: int = setting(
        3, "Consecutive steps beyond the threshold before a detector fires.", least=1
    )
    baseline_steps: int = setting(
        10, "Number of first steps whose median is the baseline of drift detectors.", least=1
    )
    rollback_lr_factor: float = setting(
        0.5, "Factor of the learning rate at each rollback.", above=0, most=1
    )
    max_rollbacks: int = setting(2, "Maximum number of rollbacks of a run; then it stops.", least=0)
    repetition: float | None = setting(
        0.3,
        "The remaining settings are the detectors' thresholds; null turns a detector off. Maximum "
        "fraction of repetitive responses.",
        least=0,
        most=1,
    )
    unscored: float | None = setting(
        0.3, "Maximum fraction of samples that the rewards could not score.", least=0, most=1
    )
    grading_failed: float | None = setting(
        0.5, "Maximum fraction of samples whose grade is a timeout or an error.", least=0, most=1
    )
    sandbox_timeouts: float | None = setting(
        0.9, "Maximum fraction of program runs in sandboxes that time out.", least=0, most=1
    )
    truncated: float | None = setting(
        0.7, "Maximum fraction of truncated responses.", least=0, most=1
    )
    truncated_groups: float | None = setting(
        0.5, "Maximum fraction of groups in which all responses are truncated.", least=0, most=1
    )
    entropy_low: float | None = setting(0.01, "Minimum entropy, in nats.", least=0)
    entropy_high: float | None = setting(
        4.0, "Maximum entropy, as a multiple of its baseline.", above=1
    )
    length_drift: float | None = setting(
        4.0,
        "Maximum factor between the mean response length and its baseline, in either direction.",
        above=1,
    )
    equal_rewards: float | None = setting(
        0.95, "Maximum fraction of groups with equal rewards.", least=0, most=1
    )
    mismatch_k3: float | None = setting(
        0.1, "Maximum trainer-engine mismatch (k3), in nats.", above=0
    )
    mismatch_ess: float | None = setting(
        0.3,
        "Minimum effective sample size of the trainer-engine mismatch, as a fraction.",
        least=0,
        most=1,
    )
    grad_norm: float | None = setting(
        20.0, "Maximum gradient norm, as a multiple of its recent median.", above=1
    )
    reward_fall: float | None = setting(
        6.0, "Maximum drop of the mean reward from its best, in standard errors.", above=0
    )
    sharpening: float | None = setting(
        2.0,
        "Maximum factor by which the entropy may fall while held-out accuracy does not rise: then "
        "the policy becomes surer of what it does already, and learns nothing.",
        above=1,
    )


# Names of the settings that are thresholds.
DETECTORS = tuple(one.name for one in fields(CollapseConfig) if str(one.type).startswith("float |"))
