import pytest
from config_cases import CPU_MACHINE

from rlmath.checks.run import check
from rlmath.config.arithmetic import batch_of, describe, resolve_layout
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.config.schema import Device
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


def recipe(name, *overrides):
    small = ["model=tiny", "actor=small", "rollout=small", "runner.run_dir=r"]
    return load([*small, f"recipe={name}", *overrides])


def test_all_are_looked_at():
    assert set(options("recipe")) == set(RECIPES)
    assert options("algorithm") == ["grpo"]


@pytest.mark.parametrize("name", options("recipe"))
def test_recipe_passes_checks_and_prints_its_batch(name, tmp_path, make_data):
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
    if minibatches > 1:
        assert f"= {prompts * samples // minibatches:,} sequences an optimizer step" in text
    assert f" {batch.sequences_per_rank:,} sequences" in text
    assert "micro-batch" in text
    if config.algorithm.filter.keep != "all":
        first = int(prompts * config.algorithm.filter.oversample)
        most = prompts * config.algorithm.filter.max_rounds
        assert f"{first:,} prompts at first, at most" in text and f"= {most:,} a step" in text
    assert (prompts, samples, minibatches) == RECIPES[name]


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_the_length_penalty_follows_the_limit(name):
    config = recipe(name, "rollout.max_response_tokens=20480")
    (penalty,) = (i for i in config.reward.items if i.name == "soft_overlong_punishment")
    reward = get_reward(penalty.name, **penalty.params)
    assert (reward.max_completion_len, reward.soft_punish_cache) == (20480, 4096)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_given_as_an_algorithm_is_an_error_that_names_the_recipe(name):
    with pytest.raises(ConfigError, match=f"use recipe={name}"):
        load(["experiment=quickstart", f"algorithm={name}"])


def test_another_loss_than_the_recipes_has_its_own_defaults():
    config = recipe("dapo", "algorithm.loss=gspo", "algorithm.aggregation=seq_mean_token_mean")
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def test_an_experiment_and_the_command_line_win_over_a_recipe():
    config = load(["experiment=quickstart", "recipe=dapo", "algorithm.loss_options.clip_high=0.3"])
    assert config.algorithm.prompts_per_step == 32
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0}
    assert config.actor.optimizer.warmup_steps == 0
    assert config.algorithm.filter.keep == "accuracy"
