"""Sections of ``algorithm``, see :class:`rlmath.config.schema.AlgorithmConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


class CorrectionKind(Enum):
    none = "none"
    auto = "auto"
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    seq_truncate = "seq_truncate"
    seq_mask_geometric = "seq_mask_geometric"
    seq_mask_sum = "seq_mask_sum"


class DppoDivergence(Enum):
    tv = "tv"
    kl = "kl"


class KlPlace(Enum):
    loss = "loss"
    reward = "reward"


class ReferenceKind(Enum):
    frozen = "frozen"
    averaged = "averaged"
    reset = "reset"


class GroupRule(Enum):
    all = "all"
    variance = "variance"
    accuracy = "accuracy"
    mean_range = "mean_range"


class TruncatedRule(Enum):
    keep = "keep"
    mask = "mask"
    penalise = "penalise"
    scale = "scale"


@dataclass
class FilterConfig:
    # Groups to train on: all, groups with unequal rewards (variance), groups with correct and
    # incorrect samples (accuracy), or groups with a mean reward between low and high (mean_range).
    # A dropped group is replaced by another problem while others still generate (dynamic sampling).
    keep: GroupRule = GroupRule.all
    # keep=mean_range: minimum mean reward; null: none.
    low: float | None = None
    # keep=mean_range: maximum mean reward; null: none.
    high: float | None = None
    # Drop a group if more than this fraction of its samples could not be scored.
    max_unscored_share: float = 0.5
    # Sample at most this many times prompts_per_step problems for a step; if too few groups pass,
    # the step is smaller.
    max_rounds: int = 4
    # Problems sampled at once per missing group; values above 1 avoid waiting for refills, and
    # surplus groups are carried over to the next step.
    oversample: float = 1.0
    # Mask repeated copies of a response within a group out of the loss.
    mask_duplicates: bool = False


@dataclass
class LengthStage:
    # First step of the stage, from 1.
    first_step: int = MISSING
    # Maximum response length of the stage, in tokens.
    max_response_tokens: int = MISSING


@dataclass
class CurriculumConfig:
    # Skip problems that are almost always or almost never solved for rest_steps steps.
    rest: bool = False
    # Skip a problem whose running pass rate is at least this.
    too_easy: float = 0.95
    # Skip a problem whose running pass rate is at most this.
    too_hard: float = 0.05
    # Steps until a skipped problem is tried again.
    rest_steps: int = 50
    # Decay of the running pass rate per visit.
    decay: float = 0.5
    # Minimum visits before a problem may be skipped.
    min_visits: int = 2
    # Maximum response length by step, at most rollout.max_response_tokens, such as [{first_step: 1,
    # max_response_tokens: 8192}, {first_step: 500, max_response_tokens: 16384}]; empty: always
    # rollout.max_response_tokens.
    length_stages: list[LengthStage] = field(default_factory=list)


@dataclass
class ReferenceConfig:
    # Reference model of the KL penalty: the initial policy (frozen), a running average of the
    # policy (averaged), or an earlier policy (reset).
    kind: ReferenceKind = ReferenceKind.frozen
    # Update an averaged or reset reference every N steps.
    every: int = 1
    # Decay of an averaged reference per update.
    decay: float = 0.99
    # Also reset Adam's moments when the reference is reset (ProRL).
    reset_optimizer: bool = False


@dataclass
class CorrectionConfig:
    # Off-policy correction of the trainer-engine mismatch with w = exp(logp_actor - logp_engine):
    # none, token_truncate (TIS), token_mask (IcePop), seq_truncate, seq_mask_geometric,
    # seq_mask_sum, or auto, which measures each step and chooses none, token_truncate or
    # token_mask.
    kind: CorrectionKind = CorrectionKind.none
    # Lower bound; null: the kind's default, see docs/algorithms.md.
    low: float | None = None
    # Upper bound; null: the kind's default.
    high: float | None = None
    # Exclude sequences that contain a token with w below this; null: off. 1e-4 is common.
    veto_below: float | None = None
    # Exclude a sequence with negative advantage from the policy loss if its mean log(engine /
    # current probability) exceeds this, in nats; null: off.
    off_policy_mask_kl: float | None = None
