"""Each recipe passes every check, shows its arithmetic, and is what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import CPU_MACHINE

from rlmath.checks.run import check
from rlmath.config.arithmetic import batch_of, describe, resolve_layout
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.config.schema import Config, Device
from rlmath.errors import ConfigError
from rlmath.model.tiny import make_tiny_model
from rlmath.rewards import get_reward

RECIPES = {
    "rlinf_grpo": (512, 16, 4),
    "dapo": (512, 16, 16),
    "dr_grpo": (128, 8, 8),
    "reinforce_pp_baseline": (512, 16, 8),
    "gspo": (512, 16, 4),
    "cispo": (512, 16, 16),
    "open_r1": (28, 16, 1),
    "distill": (512, 4, 1),
}
FIGURES: dict[str, dict[str, Any]] = {
    "rlinf_grpo": {
        "algorithm.advantage": "grpo",
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.whiten_tokens": True,
        "algorithm.loss_options.clip_low": 0.2,
        "algorithm.loss_options.clip_high": 0.2,
        "algorithm.early_stop_ratio": 5.0,
        "algorithm.kl_coef": 0.0,
        "actor.optimizer.lr": 2e-5,
        "reward.correct": 5.0,
        "reward.incorrect": -5.0,
    },
    "dapo": {
        "algorithm.loss_options.clip_low": 0.2,
        "algorithm.loss_options.clip_high": 0.28,
        "algorithm.aggregation": "token_mean",
        "algorithm.filter.keep": "accuracy",
        "algorithm.filter.oversample": 3.0,
        "algorithm.loss_options.dual_clip": 10.0,
        "algorithm.early_stop_ratio": None,
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.warmup_steps": 320,
        "reward.correct": 1.0,
        "reward.incorrect": -1.0,
    },
    "dr_grpo": {
        "algorithm.advantage": "dr_grpo",
        "algorithm.aggregation": "seq_sum_constant",
        "algorithm.early_stop_ratio": None,
        "actor.optimizer.lr": 1e-6,
    },
    "reinforce_pp_baseline": {
        "algorithm.advantage": "reinforce_pp_baseline",
        "algorithm.loss_options.clip_low": 0.2,
        "algorithm.loss_options.clip_high": 0.27,
        "algorithm.kl_coef": 1e-4,
        "algorithm.kl_estimator": "k2",
        "algorithm.correction.kind": "token_mask",
        "algorithm.correction.low": 0.5,
        "algorithm.correction.high": 5.0,
        "algorithm.early_stop_ratio": None,
        "algorithm.truncated": "scale",
        "algorithm.truncated_factor": 0.0,
        "actor.optimizer.schedule": "cosine",
        "actor.optimizer.min_lr": 1e-7,
        # 3 % of 1000 steps of 8 updates.
        "actor.optimizer.warmup_steps": 240,
    },
    "gspo": {
        "algorithm.loss": "gspo",
        "algorithm.loss_options.clip_low": 3e-4,
        "algorithm.loss_options.clip_high": 4e-4,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.early_stop_ratio": None,
    },
    "cispo": {
        "algorithm.loss": "cispo",
        "algorithm.loss_options.clip_low": 1.0,
        "algorithm.kl_coef": 0.0,
        "algorithm.early_stop_ratio": None,
    },
    "open_r1": {
        "algorithm.aggregation": "token_mean",
        "algorithm.advantage_options.epsilon": 1e-4,
        "algorithm.early_stop_ratio": None,
        "algorithm.kl_coef": 0.04,
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.min_lr": 1e-7,
        "rollout.temperature": 0.7,
    },
}


FIGURES["distill"] = {
    "algorithm.advantage": "teacher",
    "algorithm.distill_coef": 1.0,
    "algorithm.distill_clip": 5.0,
    "actor.optimizer.lr": 5e-5,
    "rollout.temperature": 1.0,
}


def value(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return getattr(found, "name", found)


def recipe(name: str, *overrides: str) -> Config:
    small = ["model=tiny", "actor=small", "rollout=small", "runner.run_dir=r"]
    return load([*small, f"recipe={name}", *overrides])


def test_all_are_looked_at() -> None:
    assert set(options("recipe")) == set(RECIPES)
    assert options("algorithm") == ["grpo"]


@pytest.mark.parametrize("name", options("recipe"))
def test_it_passes_the_checks_and_prints_its_batch(
    name: str, tmp_path: Path, make_data: Callable[..., Path]
) -> None:
    given = [f"data.train_paths=[{make_data()}]", f"runner.run_dir={tmp_path}/run"]
    if name == "distill":
        given.append(f"teacher.path={make_tiny_model(tmp_path / 'teacher')}")
    config = recipe(name, *given)
    check(config, "train", CPU_MACHINE)
    layout = resolve_layout(config, Device.cpu)
    batch = batch_of(config, layout)
    assert batch.divides()
    text = describe(config, layout)
    print(text)
    prompts, samples, minibatches = batch.prompts, batch.samples, batch.minibatches
    assert f"{prompts:,} prompts x {samples:,} samples = {prompts * samples:,} sequences" in text
    assert f"= {prompts * samples // minibatches:,} sequences an optimizer step" in text
    assert f"= {batch.sequences_per_rank:,} sequences a rank" in text
    assert "micro-batch" in text
    if config.algorithm.filter.keep != "all":
        first = int(prompts * config.algorithm.filter.oversample)
        most = prompts * config.algorithm.filter.max_rounds
        assert f"{first:,} prompts at first, at most" in text and f"= {most:,} a step" in text
    assert (prompts, samples, minibatches) == RECIPES[name]


@pytest.mark.parametrize("name", FIGURES)
def test_it_has_its_papers_figures(name: str) -> None:
    config = recipe(name)
    assert {key: value(config, key) for key in FIGURES[name]} == FIGURES[name]


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_the_length_penalty_follows_the_limit(name: str) -> None:
    config = recipe(name, "rollout.max_response_tokens=20480")
    (penalty,) = (i for i in config.reward.items if i.name == "soft_overlong_punishment")
    reward: Any = get_reward(penalty.name, **penalty.params)
    assert (reward.max_completion_len, reward.soft_punish_cache) == (20480, 4096)


def test_open_r1_has_its_three_rewards_of_one_weight() -> None:
    items = [(item.name, item.weight) for item in recipe("open_r1").reward.items]
    assert items == [("accuracy", 1.0), ("format", 1.0), ("tag_count", 1.0)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_given_as_an_algorithm_is_an_error_that_names_the_recipe(name: str) -> None:
    with pytest.raises(ConfigError, match=f"use recipe={name}"):
        load(["experiment=quickstart", f"algorithm={name}"])


def test_another_loss_than_the_recipes_has_its_own_defaults() -> None:
    config = recipe("dapo", "algorithm.loss=gspo", "algorithm.aggregation=seq_mean_token_mean")
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def test_an_experiment_and_the_command_line_win_over_a_recipe() -> None:
    config = load(["experiment=quickstart", "recipe=dapo", "algorithm.loss_options.clip_high=0.3"])
    assert config.algorithm.prompts_per_step == 32
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0}
    assert config.actor.optimizer.warmup_steps == 0
    assert config.algorithm.filter.keep == "accuracy"
