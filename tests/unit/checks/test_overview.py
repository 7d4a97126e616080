"""Overview of ``--check``: what is optimized, with which rewards, and who set it."""

import json

import pytest

from rlmath.cli import main
from rlmath.config.optimizer import OptimizerConfig
from rlmath.rewards import get_reward
from rlmath.rewards.registry import value_range

# Longest lines of a recipe's warm-up: 4 steps x 16 updates are fewer than 320.
SMALL = ["rollout.max_response_tokens=512", "actor.max_tokens_per_microbatch=2048"]


@pytest.fixture
def base(tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "solutions": ["\\boxed{2}"]}) + "\n")
    sft = tmp_path / "sft.jsonl"
    sft.write_text(json.dumps({"prompt": "1+1?", "response": "2"}) + "\n")
    return [
        "model=tiny",
        "cluster.device=cpu",
        f"data.train_paths=[{rows}]",
        f"data.eval_paths=[{rows}]",
        f"sft.train_paths=[{sft}]",
        f"runner.run_dir={tmp_path / 'run'}",
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=4",
        "algorithm.minibatches_per_step=2",
        *SMALL,
    ]


def check(words, capsys, command="train"):
    """Exit code, the printed blocks by label, standard error."""
    code = main([command, *words, "--check"])
    captured = capsys.readouterr()
    blocks = {}
    for line in captured.out.splitlines():
        label, rest = line[:9].strip(), line[9:].strip()
        if label:
            blocks[label] = rest
        else:
            blocks[list(blocks)[-1]] += "\n" + rest
    return code, blocks, captured.err


def test_check_says_what_is_trained(base, capsys):
    words = [
        *base,
        "runner.steps=10",
        "algorithm.loss=gspo",
        "algorithm.aggregation=seq_mean_token_mean",
        "algorithm.advantage=gae",
        "algorithm.kl_coef=0.01",
        "actor.optimizer.lr=1e-6",
        "actor.optimizer.schedule=cosine",
        "actor.optimizer.warmup_steps=3",
        "reward.items=[{name: math, weight: 2}, {name: format, label: layout}]",
        "reward.correct=1",
        "reward.incorrect=-1",
    ]
    code, blocks, _ = check(words, capsys)
    assert code == 0
    for part in ("gspo", "clip_high 0.2", "seq_mean_token_mean", "gae", "0.01 x k3", "frozen"):
        assert part in blocks["loss"]
    assert "1e-6 after 3 of 20 optimizer steps of warm-up, then cosine to 0" in blocks["lr"]
    assert "20 optimizer steps" in blocks["value lr"]
    assert blocks["rewards"].split("\n") == ["2 x math: -1 to 1", "layout: 0 to 1", "sum: -2 to 3"]
    assert "every 10 steps" in blocks["eval"]
    assert "1 sample each" in blocks["eval"]


@pytest.mark.parametrize(
    ("command", "key", "extra"),
    [
        ("train", "actor.optimizer", ["runner.steps=2"]),
        ("train", "value.optimizer", ["runner.steps=2", "algorithm.advantage=gae"]),
        ("sft", "sft.optimizer", ["sft.steps=4"]),
    ],
)
def test_a_warm_up_longer_than_the_run_is_an_error(command, key, extra, base, capsys):
    code, _, err = check([*base, *extra, f"{key}.warmup_steps=4"], capsys, command)
    assert code == 2
    assert f"{key}.warmup_steps=4" in err
    assert "4 optimizer steps" in err
    assert check([*base, *extra, f"{key}.warmup_steps=3"], capsys, command)[0] == 0


def test_a_value_model_that_is_trained_alone_beyond_the_end_is_an_error(base, capsys):
    gae = [*base, "algorithm.advantage=gae", "runner.steps=5"]
    code, _, err = check([*gae, "value.warmup_steps=6"], capsys)
    assert code == 2
    assert "value.warmup_steps=6: the run has 5 steps" in err and "at most 5" in err
    code, blocks, _ = check([*gae, "value.warmup_steps=5"], capsys)
    assert code == 0 and "5 steps = 0 optimizer steps" in blocks["run"], "to be continued"
    code, blocks, _ = check([*gae, "value.warmup_steps=4"], capsys)
    assert code == 0 and "5 steps = 2 optimizer steps" in blocks["run"]


def test_a_recipe_says_what_replaced_its_settings(base, capsys, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "short.yaml").write_text(
        "# @package _global_\nactor:\n  optimizer:\n    warmup_steps: 0\n"
    )
    words = [*base, "experiment=short", f"--config-dir={tmp_path / 'mine'}", "recipe=dapo"]
    code, blocks, _ = check(words, capsys)
    assert code == 0
    lines = blocks["recipe"].split("\n")
    assert lines[0].startswith("dapo: ")
    assert "4 of them replaced" in lines[0]
    assert "actor.optimizer.warmup_steps: 320 -> 0 (experiment short)" in lines
    assert "algorithm.group_size: 16 -> 4 (the command line)" in lines
    assert len(lines) == 5
    # The reward's parameter is an interpolation, and it is in force.
    assert not any("reward.items" in line for line in lines)
    # Another loss has its own options, which no file has set.
    lines = check([*words, "algorithm.loss=cispo"], capsys)[1]["recipe"].split("\n")
    assert "algorithm.loss: ppo_clip -> cispo (the command line)" in lines
    assert "algorithm.loss_options.clip_high: 0.28 -> 0.2 (the default)" in lines


def test_a_recipe_may_be_composed_of_others(base, capsys, tmp_path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "ours.yaml").write_text(
        "# @package _global_\ndefaults: [dr_grpo]\nalgorithm: {loss_options: {clip_low: 0.1}}\n"
    )
    words = [*base, f"--config-dir={tmp_path / 'mine'}", "recipe=ours"]
    code, blocks, err = check(words, capsys)
    assert code == 0, err
    assert blocks["recipe"].startswith("ours: 1 settings, all in force")


def test_without_a_recipe_none_is_named(base, capsys):
    assert "recipe" not in check(base, capsys)[1]


def test_check_of_sft_and_evaluate(base, capsys):
    code, blocks, _ = check([*base, "sft.steps=30"], capsys, "sft")
    assert code == 0
    assert "30 steps x 64 = 1,920 sequences" in blocks["examples"]
    assert "30 optimizer steps" in blocks["lr"]
    code, blocks, _ = check(base, capsys, "evaluate")
    assert code == 0
    assert "temperature 0.6" in blocks["eval"]


@pytest.mark.parametrize(("fallback", "warns"), [("number", True), ("marker", False)])
def test_fallback_number_in_training_warns(base, capsys, fallback, warns):
    _, blocks, _ = check([*base, f"reward.fallback={fallback}"], capsys)
    assert ("warning: fallback=number" in blocks["rewards"]) == warns


def test_ranges_hold_for_real_values():
    """A value outside of its range would be a lie in every overview."""
    texts = ["<think>\na\n</think>\n<answer>\nStep 1: x\n</answer>", "a a a a a a", ""]
    for name in ("format", "tag_count", "reasoning_steps", "repetition_penalty"):
        with get_reward(name) as reward:
            low, high = value_range(name, {}) or (0, 0)
            values = reward(texts, prompts=["p"] * 3, completion_ids=[[1] * 8, [1] * 8, []])
            assert all(value is None or low <= value <= high for value in values), name
            assert any(value not in (None, 0.0) for value in values), name


def test_the_learning_rate_says_where_it_comes_from(base, tmp_path, capsys):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "first.yaml").write_text("# @package _global_\nactor:\n  optimizer:\n    lr: 3e-6\n")
    (folder / "second.yaml").write_text("# @package _global_\ndefaults: [first]\n")
    mine = f"--config-dir={tmp_path / 'mine'}"
    for words, lr, source in (
        ([], "1e-6", "the default"),
        (["recipe=rlinf_grpo"], "2e-5", "recipe rlinf_grpo"),
        ([mine, "recipe=rlinf_grpo", "experiment=second"], "3e-6", "experiment second"),
        (["recipe=rlinf_grpo", "actor.optimizer.lr=5e-7"], "5e-7", "the command line"),
    ):
        code, blocks, err = check([*base, *words], capsys)
        assert code == 0, err
        first, second = blocks["lr"].split("\n")
        assert first.startswith(lr) and second == f"actor.optimizer.lr is from {source}"
    assert "sft.optimizer.lr is from the default" in check(base, capsys, "sft")[1]["lr"]


@pytest.mark.parametrize(
    ("given", "steps", "warmup"), [(None, 5, 0), (None, 40, 4), (None, 4000, 10), (7, 8, 7)]
)
def test_warm_up_without_a_setting_fits_the_run(given, steps, warmup):
    assert OptimizerConfig(warmup_steps=given).warmup_of(steps) == warmup
