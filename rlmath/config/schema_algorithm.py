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
    # Groups that are trained on: all, those whose rewards are not all equal (variance), those with
    # right and wrong samples (accuracy), or those whose mean reward is from low to high
    # (mean_range). Each group that is dropped is made up for
    # by another problem at once, while others still generate (dynamic sampling).
    keep: GroupRule = GroupRule.all
    # Least mean reward of a group with keep=mean_range; null: none.
    low: float | None = None
    # Largest mean reward of a group with keep=mean_range; null: none.
    high: float | None = None
    # A group of which nothing could score a larger share of the samples is dropped as well.
    max_unscored_share: float = 0.5
    # At most so many times prompts_per_step problems are sampled for a step; with fewer groups
    # after that the step is smaller.
    max_rounds: int = 4
    # Problems sampled at once for each group that the step still needs; above 1 fewer refills are
    # waited for, and groups that are too many are kept for the next step.
    oversample: float = 1.0
    # Mask later copies of the same response in a group out of the loss.
    mask_duplicates: bool = False


@dataclass
class LengthStage:
    # First step of the stage, from 1.
    first_step: int = MISSING
    # Longest response in it, in tokens.
    max_response_tokens: int = MISSING


@dataclass
class CurriculumConfig:
    # Let problems rest that are nearly always or nearly never solved.
    rest: bool = False
    # A problem whose running pass rate is at least this rests.
    too_easy: float = 0.95
    # A problem whose running pass rate is at most this rests.
    too_hard: float = 0.05
    # Steps that a problem rests before it is tried again.
    rest_steps: int = 50
    # What the running pass rate keeps of its past at each visit.
    decay: float = 0.5
    # Visits before a problem may rest.
    min_visits: int = 2
    # Longest responses by step, at most rollout.max_response_tokens, such as
    # [{first_step: 1, max_response_tokens: 8192}, {first_step: 500, max_response_tokens: 16384}];
    # empty: always rollout.max_response_tokens.
    length_stages: list[LengthStage] = field(default_factory=list)


@dataclass
class ReferenceConfig:
    # The model that the KL term holds the policy to: the one that the run began with (frozen), a
    # running average of the policy (averaged), or the policy of some steps ago (reset).
    kind: ReferenceKind = ReferenceKind.frozen
    # Steps between two changes of an averaged or reset reference.
    every: int = 1
    # Share of itself that an averaged reference keeps at each change.
    decay: float = 0.99
    # When the reference is reset, begin Adam's moments anew as well (ProRL).
    reset_optimizer: bool = False


@dataclass
class CorrectionConfig:
    # Correction for an engine that samples from another distribution than the actor has, by
    # w = exp(logp_actor - logp_engine): none; token_truncate (TIS), token_mask (IcePop),
    # seq_truncate, seq_mask_geometric, seq_mask_sum; auto measures each step and picks one of
    # none, token_truncate and token_mask.
    kind: CorrectionKind = CorrectionKind.none
    # Lower bound of what the kind bounds; null: its own, see docs/algorithms.md.
    low: float | None = None
    # Upper bound; null: the kind's own.
    high: float | None = None
    # A sequence with a token whose w is below this takes no part; null: no veto. 1e-4 is usual.
    veto_below: float | None = None
    # A sequence with a negative advantage takes no part in the policy loss when its mean of
    # log(engine's / current probability) is above this, in nats; null: all do.
    off_policy_mask_kl: float | None = None
