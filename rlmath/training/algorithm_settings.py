"""Meaning of ``algorithm`` in the settings for each part that the algorithm is made of."""

from __future__ import annotations

from collections.abc import Mapping

from rlmath.algorithms.advantages import AdvantageSettings
from rlmath.algorithms.kl_control import reference_weight
from rlmath.config.arithmetic import RunLayout
from rlmath.config.options import ADVANTAGE_OPTIONS
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import AlgorithmConfig, Config
from rlmath.model.fp8 import InFp8


def advantage_settings(config: Config, weights: Mapping[str, float]) -> AdvantageSettings:
    """How rewards become advantages. ``weights``: weights of the rewards, by name; rewards of
    weight 0 are only logged."""
    algorithm = config.algorithm
    return AdvantageSettings(
        name=algorithm.advantage,
        options=ADVANTAGE_OPTIONS.of(config),
        whiten_tokens=algorithm.whiten_tokens,
        whiten_epsilon=algorithm.whiten_epsilon,
        reward_weights={name: weight for name, weight in weights.items() if weight},
    )


def least_groups(config: Config, layout: RunLayout) -> int:
    """Groups that a step takes at least: each minibatch has a sequence for each data rank."""
    sequences = config.algorithm.minibatches_per_step * layout.actor.data_parallel
    return -(-sequences // config.algorithm.group_size)


def aggregation_constant(config: Config) -> int:
    """Tokens that ``seq_sum_constant`` divides by."""
    given = config.algorithm.aggregation_constant_tokens
    return config.rollout.max_response_tokens if given is None else given


def reference_kind(config: Config) -> str:
    """The reference model; none is held while the KL term has no weight."""
    algorithm = config.algorithm
    return algorithm.reference.kind.value if algorithm.kl_coef > 0 else "none"


def reference_share(algorithm: AlgorithmConfig, step: int) -> float:
    """Share of the policy that the reference takes over after a step; 0: none."""
    reference = algorithm.reference
    if algorithm.kl_coef == 0:
        return 0.0
    return reference_weight(
        reference.kind.value, step, every=reference.every, decay=reference.decay
    )


def engines_in_fp8(config: Config) -> InFp8:
    """Parts that the engines compute in FP8."""
    rollout = config.rollout
    return InFp8(
        matrices=rollout.quantization is not Quantization.none,
        kv_cache=rollout.kv_cache_dtype is KvCacheDtype.fp8,
    )
