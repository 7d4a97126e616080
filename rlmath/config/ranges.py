"""The range of every number among the settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.config.schema import Config
from rlmath.config.settings import settings


@dataclass(frozen=True)
class Range:
    """An interval; ``above`` and ``below`` are open ends, ``least`` and ``most`` closed ones."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is finite and in the interval."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        named = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        ends = [f"{words} {end:.12g}" for words, end in named.items() if end is not None]
        return " and ".join(ends) or "finite"


ANY = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
AT_LEAST_ONE = Range(least=1)
# What random generators take as a seed.
SEED = Range(least=0, most=2**32 - 1)

_OPTIMIZER = {
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "decay_steps": AT_LEAST_ONE,
    "adam_beta1": Range(least=0, below=1),
    "adam_beta2": Range(least=0, below=1),
    "adam_eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "clip_grad_norm": POSITIVE,
}

_SHARE = Range(least=0, most=1)
_DETECTORS = {
    "repetition": _SHARE,
    "truncated": _SHARE,
    "truncated_groups": _SHARE,
    "entropy_low": NOT_NEGATIVE,
    "entropy_high": Range(above=1),
    "length_drift": Range(above=1),
    "equal_rewards": _SHARE,
    "mismatch_k3": POSITIVE,
    "mismatch_ess": _SHARE,
    "grad_norm": Range(above=1),
    "reward_fall": POSITIVE,
}

RANGES: dict[str, Range] = {
    "data.max_prompt_tokens": AT_LEAST_ONE,
    "data.seed": SEED,
    "data.max_eval_problems": AT_LEAST_ONE,
    "algorithm.prompts_per_step": AT_LEAST_ONE,
    "algorithm.group_size": AT_LEAST_ONE,
    "algorithm.minibatches_per_step": AT_LEAST_ONE,
    "algorithm.pass_at_k": AT_LEAST_ONE,
    "algorithm.advantage_epsilon": NOT_NEGATIVE,
    "algorithm.aggregation_constant_tokens": AT_LEAST_ONE,
    # At 1 there is no lower bound.
    "algorithm.clip_low": Range(least=0, most=1),
    "algorithm.clip_high": NOT_NEGATIVE,
    "algorithm.dual_clip": Range(above=1),
    "algorithm.sapo_tau_positive": POSITIVE,
    "algorithm.sapo_tau_negative": POSITIVE,
    "algorithm.dppo_threshold": POSITIVE,
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.kl_target": POSITIVE,
    "algorithm.kl_horizon_samples": AT_LEAST_ONE,
    "algorithm.reference.every": AT_LEAST_ONE,
    "algorithm.reference.decay": Range(least=0, below=1),
    "algorithm.entropy_coef": ANY,
    "algorithm.entropy_target": POSITIVE,
    "algorithm.entropy_coef_step": POSITIVE,
    "algorithm.entropy_coef_max": POSITIVE,
    "algorithm.entropy_top_share": Range(above=0, most=1),
    "algorithm.early_stop_ratio": Range(above=1),
    "algorithm.truncated_penalty": POSITIVE,
    "algorithm.truncated_factor": Range(least=0, below=1),
    "algorithm.filter.low": ANY,
    "algorithm.filter.high": ANY,
    "algorithm.filter.max_unscored_share": Range(least=0, most=1),
    "algorithm.filter.max_rounds": AT_LEAST_ONE,
    "algorithm.filter.oversample": Range(least=1, most=4),
    "algorithm.curriculum.too_easy": Range(above=0, most=1),
    "algorithm.curriculum.too_hard": Range(least=0, below=1),
    "algorithm.curriculum.rest_steps": AT_LEAST_ONE,
    "algorithm.curriculum.decay": Range(least=0, below=1),
    "algorithm.curriculum.min_visits": AT_LEAST_ONE,
    "algorithm.curriculum.length_stages[].first_step": AT_LEAST_ONE,
    "algorithm.curriculum.length_stages[].max_response_tokens": AT_LEAST_ONE,
    "algorithm.correction.low": POSITIVE,
    "algorithm.correction.high": POSITIVE,
    "algorithm.correction.veto_below": Range(above=0, below=1),
    "algorithm.correction.off_policy_mask_kl": NOT_NEGATIVE,
    "actor.tensor_parallel": AT_LEAST_ONE,
    "actor.pipeline_parallel": AT_LEAST_ONE,
    "actor.context_parallel": AT_LEAST_ONE,
    "actor.data_parallel": AT_LEAST_ONE,
    "actor.expert_parallel": AT_LEAST_ONE,
    "actor.recompute_num_layers": AT_LEAST_ONE,
    "actor.max_tokens_per_microbatch": AT_LEAST_ONE,
    "actor.num_threads": AT_LEAST_ONE,
    **{f"actor.optimizer.{name}": limits for name, limits in _OPTIMIZER.items()},
    "value.gamma": Range(above=0, most=1),
    "value.lam": Range(least=0, most=1),
    "value.clip": POSITIVE,
    "value.warmup_steps": NOT_NEGATIVE,
    **{f"value.optimizer.{name}": limits for name, limits in _OPTIMIZER.items()},
    "rollout.engines": AT_LEAST_ONE,
    "rollout.tensor_parallel": AT_LEAST_ONE,
    "rollout.max_response_tokens": AT_LEAST_ONE,
    "rollout.temperature": POSITIVE,
    "rollout.max_running_sequences": AT_LEAST_ONE,
    "rollout.max_batched_tokens": AT_LEAST_ONE,
    "rollout.gpu_memory_utilization": Range(above=0, most=1),
    "rollout.cpu_kv_cache_gib": POSITIVE,
    "rollout.stall_timeout_s": POSITIVE,
    "rollout.max_engine_restarts": NOT_NEGATIVE,
    "weights.bucket_size_mib": AT_LEAST_ONE,
    "weights.verify_every": NOT_NEGATIVE,
    "reward.items[].weight": ANY,
    "reward.correct": ANY,
    "reward.incorrect": ANY,
    "reward.num_workers": AT_LEAST_ONE,
    "reward.timeout_s": POSITIVE,
    "eval.benchmarks[].samples": AT_LEAST_ONE,
    "eval.benchmarks[].temperature": NOT_NEGATIVE,
    "eval.benchmarks[].top_p": Range(above=0, most=1),
    "eval.benchmarks[].max_response_tokens": AT_LEAST_ONE,
    "eval.benchmarks[].max_problems": AT_LEAST_ONE,
    "eval.every": NOT_NEGATIVE,
    "eval.samples": AT_LEAST_ONE,
    "eval.temperature": NOT_NEGATIVE,
    "eval.top_p": Range(above=0, most=1),
    "eval.max_response_tokens": AT_LEAST_ONE,
    "alignment.every": NOT_NEGATIVE,
    # A mean of exp of something that is not negative.
    "alignment.max_mean_exp_abs_diff": AT_LEAST_ONE,
    "cluster.nodes": AT_LEAST_ONE,
    "cluster.gpus_per_node": AT_LEAST_ONE,
    # The least that Ray starts with is about 75 MiB.
    "cluster.object_store_mib": Range(least=80),
    "sft.steps": AT_LEAST_ONE,
    "sft.sequences_per_step": AT_LEAST_ONE,
    "sft.save_every": NOT_NEGATIVE,
    **{f"sft.optimizer.{name}": limits for name, limits in _OPTIMIZER.items()},
    "watchdog.stall_s": POSITIVE,
    "collapse.patience_steps": AT_LEAST_ONE,
    "collapse.baseline_steps": AT_LEAST_ONE,
    "collapse.rollback_lr_factor": Range(above=0, most=1),
    "collapse.max_rollbacks": NOT_NEGATIVE,
    **{f"collapse.{name}": limits for name, limits in _DETECTORS.items()},
    "runner.steps": AT_LEAST_ONE,
    "runner.seed": SEED,
    "runner.save_every": NOT_NEGATIVE,
    "runner.keep_checkpoints": AT_LEAST_ONE,
    "runner.max_restarts": NOT_NEGATIVE,
    "runner.samples_every": AT_LEAST_ONE,
    "runner.tensorboard_samples": NOT_NEGATIVE,
    "runner.check_export_sequences": NOT_NEGATIVE,
}


def out_of_range(config: Config) -> Iterator[str]:
    """A message for each number outside its range."""
    for setting in settings():
        if setting.key not in RANGES:
            continue
        limits = RANGES[setting.key]
        for key, value in _values(config, setting.key):
            if value is not None and not limits.holds(value):
                null = ", or null" if setting.optional else ""
                yield f"{key}={value}: has to be {limits}{null}"


def _values(config: Config, key: str) -> Iterator[tuple[str, float | None]]:
    """The key and value of a setting; of each item for a key with ``[]``."""
    if "[]" in key:
        outer, inner = key.split("[].")
        for index, item in enumerate(_get(config, outer)):
            yield f"{outer}[{index}].{inner}", getattr(item, inner)
    else:
        yield key, _get(config, key)


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
