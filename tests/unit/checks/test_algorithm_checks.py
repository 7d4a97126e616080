"""Settings of the algorithm that would do nothing, or cannot work, are refused by name."""

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.config.load import load


def problems(*overrides):
    settings = [f"algorithm.{text}" for text in overrides]
    return list(algorithm_problems(load(["model.path=m", "runner.run_dir=r", *settings])))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["whiten_epsilon=1e-4"], ["whiten_epsilon=0.0001", "use whiten_tokens=true"]),
        (
            ["advantage=pass_at_k", "advantage_options.k=16"],
            ["at most one set of 16", "at most 15", "of 17"],
        ),
        (["loss=gspo"], ["aggregation=token_mean", "gspo", "aggregation=seq_mean_token_mean"]),
        (["loss=gspo_token"], ["use algorithm.aggregation=seq_mean_token_mean"]),
        (["loss=gmpo"], ["use algorithm.aggregation=seq_mean_token_mean"]),
        (["loss=sapo"], ["sapo", "algorithm.allow_other_aggregation=true"]),
        (["loss=gmpo", "aggregation=seq_sum_constant"], ["aggregation=seq_sum_constant", "gmpo"]),
        (["allow_other_aggregation=true"], ["allow_other_aggregation=true", "does nothing"]),
        (["aggregation_constant_tokens=9"], ["use aggregation=seq_sum_constant"]),
        (["whiten_tokens=true", "advantage=reinforce_pp"], ["whitened over tokens already"]),
        (["whiten_tokens=true", "advantage=gae"], ["value.whiten_advantages"]),
        (["truncated_factor=0.5"], ["truncated_factor=0.5", "use truncated=scale"]),
        (["truncated=scale", "advantage=gdpo"], ["truncated=scale", "reward stop_properly"]),
        (["correction.low=0.5"], ["correction.low=0.5", "kind=none has no such bound"]),
        (["correction.kind=token_truncate", "correction.low=0.5"], ["low=0.5", "token_mask"]),
        (
            ["correction.kind=token_mask", "correction.low=3", "correction.high=2"],
            ["low=3: is above correction.high=2"],
        ),
        (["correction.kind=auto", "correction.high=3"], ["kind=auto has no such bound"]),
        (["correction.kind=auto", "old_log_probs=engine"], ["old_log_probs=recompute"]),
        (["correction.veto_below=1e-4", "old_log_probs=engine"], ["correction.veto_below=0.0001"]),
        (["kl_in=reward", "kl_coef=0.1"], ["kl_estimator=k3", "use kl_estimator=k1"]),
        (["kl_target=0.1"], ["kl_target=0.1", "kl_coef=0.0", "more than 0"]),
        (["kl_horizon_samples=9", "kl_coef=1"], ["kl_horizon_samples=9", "kl_target=null"]),
        (["reference.kind=reset"], ["reference.kind=reset", "kl_coef=0.0"]),
        (["reference.every=2", "kl_coef=1"], ["every=2", "kind=averaged or reset"]),
        (["reference.decay=0.5", "reference.kind=reset", "kl_coef=1"], ["use reference.kind="]),
        (["entropy_coef_step=0.1"], ["entropy_coef_step=0.1", "entropy_target=null"]),
        (["entropy_target=1", "entropy_coef=-0.1"], ["entropy_coef=-0.1", "entropy_coef_max=0.1"]),
        (
            ["entropy_top_share=0.2", "loss=gspo", "aggregation=seq_mean_token_mean"],
            ["entropy_top_share=0.2", "ppo_clip"],
        ),
        (["filter.oversample=2"], ["oversample=2.0", "variance, accuracy, mean_range"]),
        (
            ["filter.keep=variance", "filter.oversample=3", "filter.max_rounds=2"],
            ["oversample=3", "max_rounds=2", "at most 2"],
        ),
        (["truncated_penalty=2"], ["truncated_penalty=2.0", "use truncated=penalize"]),
        (["truncated=penalize", "advantage=gdpo"], ["reward stop_properly"]),
        (
            ["filter.keep=variance", "group_size=1", "advantage=reinforce_pp"],
            ["always equal", "group_size of 2"],
        ),
        (["curriculum.too_easy=0.9"], ["too_easy=0.9", "use curriculum.cooldown=true"]),
        (
            ["curriculum.cooldown=true", "curriculum.too_easy=0.1", "curriculum.too_hard=0.1"],
            ["too_hard=0.1: has to be less than curriculum.too_easy=0.1"],
        ),
        (
            ["curriculum.length_stages=[{first_step: 2, max_response_tokens: 9}]"],
            ["first steps are [2]"],
        ),
        (
            ["curriculum.length_stages=[{first_step: 1, max_response_tokens: 99999}]"],
            ["length_stages[0].max_response_tokens=99999", "max_response_tokens=27648"],
        ),
        (["group_size=1", "advantage=batch_std"], ["group_size=1: batch_std compares"]),
    ],
)
def test_algorithm_settings_that_are_refused(overrides, expected):
    found = problems(*overrides)
    assert len(found) == 1, found
    for part in expected:
        assert part in found[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=cispo", "loss_options.clip_low=1", "loss_options.clip_high=4"],
        ["loss=gspo", "aggregation=seq_mean_token_mean", "loss_options.clip_low=3e-4"],
        ["loss=gspo", "aggregation=seq_mean_token_sum"],
        ["loss=gspo", "allow_other_aggregation=true"],
        ["loss=gmpo", "aggregation=seq_mean_token_mean", "loss_options.dual_clip=3"],
        ["loss=dppo", "loss_options.dual_clip=1.1"],
        ["loss=sapo", "aggregation=seq_mean_token_mean", "loss_options.tau_negative=1.1"],
        ["advantage=dr_grpo", "whiten_tokens=true", "whiten_epsilon=1e-4"],
        ["advantage_options.leave_one_out=true", "advantage_options.leave_one_out_std=true"],
        ["aggregation=seq_sum_constant", "aggregation_constant_tokens=3000"],
        ["truncated=scale", "truncated_factor=0.5"],
        ["loss=dppo", "loss_options.divergence=kl", "loss_options.threshold=0.1"],
        ["advantage=pass_at_k", "advantage_options.k=8"],
        ["advantage=reinforce_pp", "group_size=1"],
        ["correction.kind=token_mask", "correction.low=0.25", "correction.veto_below=1e-4"],
        ["correction.kind=seq_truncate", "correction.high=5"],
        ["correction.off_policy_mask_kl=0.1", "old_log_probs=engine"],
        ["kl_coef=0.1", "kl_in=reward", "kl_estimator=k1", "kl_target=0.01"],
        ["kl_coef=0.1", "reference.kind=averaged", "reference.every=2", "reference.decay=0.9"],
        ["kl_coef=0.1", "reference.kind=reset", "reference.reset_optimizer=true"],
        ["entropy_target=0.2", "entropy_top_share=0.2"],
        ["entropy_top_share=0.2", "loss=gspo_token", "aggregation=seq_mean_token_mean"],
        ["filter.keep=variance", "filter.oversample=1.5", "truncated=mask"],
        [
            "filter.keep=mean_range",
            "filter.options.high=4",
            "truncated=penalize",
            "truncated_penalty=2",
        ],
        ["curriculum.cooldown=true", "curriculum.cooldown_steps=5"],
        ["curriculum.length_stages=[{first_step: 1, max_response_tokens: 8192}]"],
        ["filter.keep=accuracy"],
    ],
)
def test_algorithm_settings_that_pass(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize("own", ["mine.py:f", "code", "remote", "format"])
@pytest.mark.parametrize(
    ("asking", "beside"),
    [
        ("recipe=dapo", "use keep=variance"),
        ("algorithm.filter.keep=accuracy", "use keep=variance"),
        ("algorithm.curriculum.cooldown=true", "set it to false"),
    ],
)
def test_correctness_settings_need_a_grading_reward(own, asking, beside):
    def problems_of(items):
        given = ["model.path=m", "runner.run_dir=r", asking, f"reward.items=[{items}]"]
        return [text for text in algorithm_problems(load(given)) if "grades answers" in text]

    (message,) = problems_of(f"{{name: '{own}'}}")
    assert f"({own}) has no reward" in message
    assert "add {name: math, weight: 0}" in message and beside in message
    assert problems_of(f"{{name: '{own}'}}, {{name: math, weight: 0}}") == []
    assert problems_of(f"{{name: '{own}'}}, {{name: cosine}}") == []
