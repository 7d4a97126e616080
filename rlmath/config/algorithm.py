"""Settings of ``algorithm``: sampling, advantages, loss, KL and entropy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rlmath.algorithms.advantages import AdvantageSettings
from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.curriculum import CooldownSettings
from rlmath.algorithms.filters import FilterConfig, TruncatedRule
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.utils.setting import OnlyWith, setting

OldLogProbs = StrEnum("OldLogProbs", ["recompute", "engine"])
KlPlace = StrEnum("KlPlace", ["loss", "reward"])


class ReferenceKind(StrEnum):
    frozen = "frozen"
    averaged = "averaged"
    reset = "reset"


@dataclass
class LengthStage:
    first_step: int = setting(MISSING, "First step of the stage, from 1.", least=1)
    max_response_tokens: int = setting(
        MISSING, "Maximum response length of the stage, in tokens.", least=1
    )


@dataclass
class CurriculumConfig(CooldownSettings):
    length_stages: list[LengthStage] = setting(
        list,
        "Maximum response length by step, at most rollout.max_response_tokens, such as "
        "[{first_step: 1, max_response_tokens: 8192}, {first_step: 500, max_response_tokens: "
        "16384}]; empty: always rollout.max_response_tokens.",
    )


@dataclass
class ReferenceConfig:
    kind: ReferenceKind = setting(
        ReferenceKind.frozen,
        "Reference model of the KL penalty: the initial policy (frozen), a running average of the "
        "policy (averaged), or an earlier policy (reset).",
        only_with=OnlyWith("algorithm.kl_coef", words="more than 0"),
    )
    every: int = setting(
        1,
        "Update an averaged or reset reference every N steps.",
        least=1,
        only_with=OnlyWith("kind", (ReferenceKind.averaged, ReferenceKind.reset)),
    )
    decay: float = setting(
        0.99,
        "Decay of an averaged reference per update.",
        least=0,
        below=1,
        only_with=OnlyWith("kind", (ReferenceKind.averaged,)),
    )
    reset_optimizer: bool = setting(
        False,
        "Also reset Adam's moments when the reference is reset (ProRL).",
        only_with=OnlyWith("kind", (ReferenceKind.reset,)),
    )


@dataclass
class AlgorithmConfig:
    prompts_per_step: int = setting(512, "Problems sampled per step.", least=1, common=True)
    group_size: int = setting(16, "Samples per problem.", least=1, common=True)
    minibatches_per_step: int = setting(
        4,
        "Optimizer steps per rollout; the sequences of a step are split into this many "
        "minibatches.",
        least=1,
        common=True,
    )
    advantage: str = setting(
        AdvantageSettings.name, "Advantage estimator; see rlmath/algorithms/advantages/."
    )
    advantage_options: dict[str, Any] = setting(
        dict, "Options of the advantage estimator, see the tables below."
    )
    whiten_tokens: bool = setting(
        AdvantageSettings.whiten_tokens,
        "Whiten advantages over all response tokens of the step after the estimator.",
    )
    whiten_epsilon: float = setting(
        AdvantageSettings.whiten_epsilon,
        "Added to the standard deviation that whiten_tokens divides by.",
        least=0,
        only_with=OnlyWith("whiten_tokens", (True,)),
    )
    loss: str = setting(ObjectiveSettings.loss, "Policy loss; see rlmath/algorithms/losses/.")
    loss_options: dict[str, Any] = setting(dict, "Options of the loss, see the tables below.")
    aggregation: str = setting(
        "token_mean", "How token losses are aggregated; see rlmath/algorithms/aggregation.py."
    )
    aggregation_constant_tokens: int | None = setting(
        None,
        "Divisor of seq_sum_constant, in tokens; null: rollout.max_response_tokens.",
        least=1,
        only_with=OnlyWith("aggregation", ("seq_sum_constant",)),
    )
    aggregation_options: dict[str, Any] = setting(dict, "Options of an aggregation of yours.")
    allow_other_aggregation: bool = setting(
        False,
        "Allow an aggregation that the loss is not defined for; the result is not the published "
        "method.",
    )
    kl_coef: float = setting(
        ObjectiveSettings.kl_coef,
        "Coefficient of the KL penalty against the reference model; 0: no reference model is "
        "loaded.",
        least=0,
        common=True,
    )
    kl_estimator: str = setting(
        ObjectiveSettings.kl_estimator, "KL estimator: k1, k2, k3 or k3_unbiased."
    )
    kl_options: dict[str, Any] = setting(dict, "Options of a KL estimator of yours.")
    kl_in: KlPlace = setting(
        KlPlace.loss,
        "Add the KL penalty to the loss, or subtract it from the reward of each token (k1 only).",
        only_with=OnlyWith("kl_coef", words="more than 0"),
    )
    kl_target: float | None = setting(
        None,
        "Adapt kl_coef towards this mean KL per token, in nats; null: kl_coef is constant.",
        above=0,
        only_with=OnlyWith("kl_coef", words="more than 0"),
    )
    kl_horizon_samples: int = setting(
        10000,
        "Number of samples over which a 20 % deviation from kl_target changes kl_coef by 20 %.",
        least=1,
        only_with=OnlyWith("kl_target", words="a number"),
    )
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    distill_coef: float = setting(
        0.0,
        "On-policy distillation: each token's advantage gains this times the log-prob of a teacher "
        "(section teacher) less that of the policy, which lowers the reverse KL to the teacher "
        "token by token; 0: no teacher. With advantage=teacher it is the whole advantage.",
        least=0,
    )
    distill_clip: float = setting(
        5.0,
        "Bound of the difference between the log-probs of teacher and policy, in nats.",
        above=0,
        only_with=OnlyWith("distill_coef", words="more than 0"),
    )
    entropy_coef: float = setting(
        ObjectiveSettings.entropy_coef,
        "Coefficient of the entropy bonus; negative values decrease entropy.",
    )
    entropy_target: float | None = setting(
        None,
        "Adapt entropy_coef towards this entropy, in nats per token; null: entropy_coef is "
        "constant.",
        above=0,
    )
    entropy_coef_step: float = setting(
        0.005,
        "Change of entropy_coef per step while adapting to entropy_target.",
        above=0,
        only_with=OnlyWith("entropy_target", words="a number"),
    )
    entropy_coef_max: float = setting(
        0.1,
        "Maximum entropy_coef while adapting to entropy_target.",
        above=0,
        only_with=OnlyWith("entropy_target", words="a number"),
    )
    entropy_top_share: float = setting(
        1.0,
        "Fraction of the step's tokens, those with the highest entropy, that have a policy loss; "
        "1: all. The other tokens still count in denominators and in the KL, entropy and value "
        "terms.",
        above=0,
        most=1,
    )
    early_stop_ratio: float | None = setting(
        ObjectiveSettings.ratio_threshold,
        "Discard a minibatch whose mean importance ratio exceeds this; null: discard only "
        "non-finite minibatches.",
        above=1,
    )
    early_stop_rest: bool = setting(
        False, "Also discard the remaining minibatches of the step after a discarded one."
    )
    old_log_probs: OldLogProbs = setting(
        OldLogProbs.recompute,
        "Old log-probs: recomputed by the actor before the update, or taken from the engine.",
    )
    truncated: TruncatedRule = setting(
        TruncatedRule.keep,
        "Truncated responses: keep, mask out of the loss (their rewards still count in their "
        "groups), subtract truncated_penalty from their rewards (penalize), or multiply their "
        "rewards by truncated_factor (scale), which suits non-negative rewards.",
    )
    truncated_penalty: float = setting(
        1.0,
        "Amount that truncated=penalize subtracts.",
        above=0,
        only_with=OnlyWith("truncated", (TruncatedRule.penalize,)),
    )
    truncated_factor: float = setting(
        0.0,
        "Factor of truncated=scale; 0: truncated responses have reward 0.",
        least=0,
        below=1,
        only_with=OnlyWith("truncated", (TruncatedRule.scale,)),
    )
    filter: FilterConfig = field(default_factory=FilterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


def needs_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Whether the algorithm needs the actor's log-probs before the first update."""
    correction = algorithm.correction
    corrects = correction.is_on
    needs_entropy = algorithm.entropy_target is not None or algorithm.entropy_top_share < 1
    recomputes = algorithm.old_log_probs is OldLogProbs.recompute
    in_advantage = algorithm.kl_in is KlPlace.reward or algorithm.distill_coef > 0
    earlier = algorithm.minibatches_per_step > 1 or in_advantage
    return corrects or needs_entropy or (recomputes and earlier)
