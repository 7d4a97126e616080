import os

import pytest
from omegaconf import OmegaConf

from rlmath.config.groups import options
from rlmath.config.load import load, save, to_plain, to_yaml, with_values
from rlmath.config.schema import Config, DType, RewardItem
from rlmath.config.settings import settings
from rlmath.errors import ConfigError
from tests.support.case_files import on_cases
from tests.support.program_answers import output_of

GIVEN = ["model.path=m", "runner.run_dir=r"]


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, *overrides])
    return str(caught.value)


def test_defaults_are_typed_dataclasses():
    config = load(GIVEN)
    assert type(config) is Config
    assert config.model.dtype is DType.bfloat16
    assert config.reward.items == [RewardItem(name="math", weight=1.0, params={})]
    assert config.actor.optimizer.lr == 1e-6


def test_overrides_reach_nested_settings_and_lists():
    config = load(
        [
            *GIVEN,
            "actor.optimizer.lr=1e-6",
            "data.train_paths=[../shared/data/gsm8k_train.jsonl,b.parquet]",
            "reward.items=[{name: math, weight: 2}, {name: format, params: {tag: think}}]",
            "data.prompt_template='Solve: {prompt}'",
            "actor.optimizer.schedule=cosine",
        ]
    )
    assert config.actor.optimizer.lr == 1e-6
    assert config.data.train_paths == ["../shared/data/gsm8k_train.jsonl", "b.parquet"]
    assert [item.weight for item in config.reward.items] == [2.0, 1.0]
    assert config.reward.items[1].params == {"tag": "think"}
    assert config.data.prompt_template == "Solve: {prompt}"


def test_settings_of_one_load_are_not_in_the_next():
    before = load(GIVEN)
    changed = load([*GIVEN, "actor.tensor_parallel=2", "algorithm.loss_options.clip_low=0.1"])
    changed.reward.items.append(RewardItem(name="length"))
    changed.algorithm.loss_options["clip_low"] = 0.7
    assert load(GIVEN) == before != changed


def test_interpolations_are_resolved():
    assert load([*GIVEN, "runner.run_dir=runs/${model.path}"]).runner.run_dir == "runs/m"


@on_cases("override, expected", __file__, "override_refused")
def test_a_bad_override_is_refused_by_name(override, expected):
    message = refusal(override)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~/x", "/home/me/x"),
        ("'~/x'", "/home/me/x"),
        ("runs/lr=1e-5", "runs/lr=1e-5"),
        ("runs/über", "runs/über"),
        ("a, (b) [c]", "a, (b) [c]"),
        ('a"b', 'a"b'),
        ("run(1)", "run(1)"),
    ],
)
def test_paths_are_taken_as_typed(monkeypatch, given, expected):
    monkeypatch.setenv("HOME", "/home/me")
    assert load(["model.path=m", f"runner.run_dir={given}"]).runner.run_dir == expected
    saved = to_plain(load(GIVEN))
    assert with_values(saved, [f"runner.run_dir={given}"]).runner.run_dir == expected


def test_lists_of_paths_and_texts_are_taken_as_typed(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = ["data.train_paths=[~/a.jsonl,b=c.jsonl, problème.jsonl]"]
    given += ["eval.benchmarks=[{name: aime24, path: '~/b'}]"]
    given += ["data.prompt_template=Solve: {prompt}, then box it"]
    config = load([*GIVEN, *given])
    assert config.data.train_paths == ["/home/me/a.jsonl", "b=c.jsonl", "problème.jsonl"]
    assert config.eval.benchmarks[0].path == "/home/me/b"
    assert config.data.prompt_template == "Solve: {prompt}, then box it"


def test_all_bad_overrides_are_reported_together():
    message = refusal("actor.tensr_parallel=2", "model.dtype=float16", "runner.steps=ten")
    assert message.startswith("3 errors\n")
    for key in ("actor.tensr_parallel", "model.dtype", "runner.steps"):
        assert key in message


def test_missing_settings_are_listed_with_the_experiments():
    with pytest.raises(ConfigError) as caught:
        load([])
    message = str(caught.value)
    assert "model.path has to be given (Hugging Face folder" in message
    assert "runner.run_dir has to be given" in message
    assert "quickstart" in message


def test_a_bad_file_names_key_and_nearest(tmp_path):
    (tmp_path / "experiment").mkdir()
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.write_text("# @package _global_\nactor:\n  tensr_parallel: 2\n")
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, "experiment=mine"], tmp_path)
    assert "tensr_parallel" in str(caught.value)
    assert "did you mean actor.tensor_parallel" in str(caught.value)
    mine.write_text("# @package _global_\nactor:\n  tensor_parallel: two\n")
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, "experiment=mine"], tmp_path)
    assert "two" in str(caught.value)
    assert "whole number" in str(caught.value)
    mine.write_text("# @package _global_\ndefaults:\n  - override /model: no_such_model\n")
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, "experiment=mine"], tmp_path)
    assert "model/no_such_model" in str(caught.value)
    assert "tiny" in str(caught.value)
    mine.write_text("actor: [\n")
    with pytest.raises(ConfigError, match=r"not YAML: .*mine.yaml"):
        load([*GIVEN, "experiment=mine"], tmp_path)


def test_a_file_without_its_package_line_says_which_line(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("actor:\n  tensor_parallel: 2\n")
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, "experiment=mine"], tmp_path)
    assert "experiment/mine.yaml: its first line has to be '# @package _global_'" in str(
        caught.value
    )


def test_the_quickstart_is_in_its_run_dir():
    config = load(["experiment=quickstart", "runner.run_dir=elsewhere"])
    assert config.model.path == "elsewhere/model"
    assert config.data.train_paths == ["elsewhere/data/train.jsonl"]
    assert config.data.eval_paths == ["elsewhere/data/eval.jsonl"]
    assert config.sft.train_paths == ["elsewhere/data/sft.jsonl"]


def test_options_of_ones_own(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\nrunner:\n  run_dir: mine\n"
    )
    config = load(["experiment=mine", "runner.steps=3"], tmp_path)
    assert (config.model.path, config.runner.run_dir, config.runner.steps) == ("tiny", "mine", 3)
    assert "mine" in options("experiment", tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        load(GIVEN, tmp_path / "nowhere")


def test_saved_settings_read_back_equal(tmp_path):
    config = load(["experiment=quickstart", "runner.run_dir=runs/${model.dtype}"])
    save(config, tmp_path / "run" / "config.yaml")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "${" not in text
    assert text == to_yaml(config)
    again = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text))
    assert OmegaConf.to_object(again) == config
    assert os.listdir(tmp_path / "run") == ["config.yaml"]


@pytest.mark.process
def test_composes_from_any_folder_and_without_heavy_imports(tmp_path):
    code = (
        "import sys\n"
        "from rlmath.config.load import load\n"
        "print(load(['experiment=quickstart']).runner.run_dir)\n"
        "print([m for m in ('torch', 'vllm', 'megatron', 'ray') if m in sys.modules])\n"
    )
    assert output_of(code, cwd=tmp_path).splitlines() == ["runs/quickstart", "[]"]


def test_every_setting_is_documented_and_every_number_has_a_range():
    assert [setting.key for setting in settings() if not setting.doc] == []
    # A weight or a reward may have either sign.
    unbounded = {
        "algorithm.entropy_coef",
        "reward.items[].weight",
        "reward.correct",
        "reward.incorrect",
    }
    numbers = [setting for setting in settings() if setting.type in (int, float)]
    assert {one.key for one in numbers if str(one.limits) == "finite"} == unbounded
    others = [setting for setting in settings() if setting.type not in (int, float)]
    assert {str(one.limits) for one in others} == {"finite"}
