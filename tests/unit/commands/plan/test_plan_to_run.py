"""From a plan to a run: a command, an experiment file, a way out when nothing fits, names."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from rlmath.cli import main
from rlmath.commands.plan.gpus import gpu_named
from rlmath.commands.plan.models import read_named_model
from rlmath.config.load import load
from rlmath.errors import UserError
from rlmath.model.published import published_name, published_spec

# Too slow to run after each change.
pytestmark = pytest.mark.process

SMALL = [
    "model.path=Qwen2.5-0.5B",
    "algorithm.prompts_per_step=64",
    "rollout.max_response_tokens=2048",
    "actor.tensor_parallel=1",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1+1?", "solutions": ["\\boxed{2}"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")


def plan(*words):
    return main(["plan", "layout", *words])


def test_the_command_of_a_plan_passes_the_check(capsys):
    given = ["algorithm.kl_coef=0.02", "data.answer_key=solutions", "runner.steps=7"]
    assert plan(*SMALL, "--command", *given) == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = shlex.split(line)
    assert words[:2] == ["rlmath", "train"]
    assert set(given) <= set(words), "settings that a plan does not depend on are kept"
    assert "data.train_paths=[train.jsonl]" in words
    # On the hub, for the folder is not here.
    words = [word.replace("models/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B") for word in words]
    assert main([*words[1:], "--check"]) == 0
    out = capsys.readouterr().out
    assert "64 prompts x 16 samples" in out
    assert "KL penalty 0.02" in out
    assert "an H100 is too small" not in out


def test_the_experiment_of_a_plan_is_one(capsys):
    write = ["--write", "mine", "--config-dir", "groups"]
    hub = ["model.path=Qwen/Qwen2.5-0.5B", *SMALL[1:]]
    assert plan(*hub, "runner.steps=7", *write) == 0
    assert "rlmath train --config-dir groups experiment=mine --check" in capsys.readouterr().out
    assert main(["train", "--config-dir", "groups", "experiment=mine", "--check"]) == 0
    out = capsys.readouterr().out
    assert "7 steps = 28 optimizer steps" in out
    assert plan(*hub, *write) == 2
    assert "exists; give another name" in capsys.readouterr().err
    assert "steps: 7" in Path("groups/experiment/mine.yaml").read_text()
    assert plan("--write", "../mine", *hub) == 2
    # With "=" too, where a plan depends on neither the steps nor the recipe.
    capsys.readouterr()
    words = [*hub, "recipe=dapo", "algorithm.group_size=8", "runner.steps=70"]
    assert plan(*words, "--write=other", *write[2:]) == 0, capsys.readouterr().err
    words = ["model.path=Qwen/Qwen2.5-1.5B", "experiment=gsm8k_smoke", "runner.steps=9"]
    words += ["data.prompt_key=prompt", "data.answer_key=solutions"]
    assert plan(*words, "--write=third", *write[2:]) == 0, capsys.readouterr().err
    capsys.readouterr()
    train = ["train", "--config-dir", "groups", "--check"]
    assert main([*train, "experiment=other"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "recipe   dapo: " in out
    assert "algorithm.group_size: 16 -> 8 (experiment other)" in out
    assert main([*train, "experiment=third"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "Qwen2.5-1.5B" in out
    assert "9 steps" in out


def test_values_of_an_experiment_of_a_plan_are_those_that_were_typed():
    template = r"data.prompt_template='{prompt}\nPut it in \\boxed{}.'"
    hub = ["model.path=Qwen/Qwen2.5-0.5B", *SMALL[1:]]
    write = ["--write", "typed", "--config-dir", "groups"]
    assert plan(*hub, template, "actor.optimizer.lr=1e-6", *write) == 0
    written = yaml.safe_load(Path("groups/experiment/typed.yaml").read_text())
    assert written["data"]["prompt_template"] == "{prompt}\nPut it in \\boxed{}."
    config = load(["experiment=typed"], "groups")
    assert config.data.prompt_template == "{prompt}\nPut it in \\boxed{}."
    assert config.actor.optimizer.lr == 1e-6


def test_a_setting_that_a_plan_ignores_is_refused_without_a_run(capsys):
    assert plan(*SMALL, "runner.steps=7") == 2
    assert "runner.steps: this command does not use it" in capsys.readouterr().err


def test_plan_names_layouts_that_fit(capsys):
    words = ["model.path=Qwen2.5-32B", "actor.tensor_parallel=8", "rollout.tensor_parallel=8"]
    assert plan(*words, "actor.offload=none") == 2
    err = capsys.readouterr().err
    assert "no layout of this model fits 8 GPUs" in err
    fits = err.partition("what fits:")[2]
    assert "16 h100: cluster.nodes=2" in fits
    assert "8 h200: --gpu h200" in fits
    moved = [line for line in fits.splitlines() if "host memory" in line]
    assert len(moved) == 1
    assert "actor.offload=optimizer actor.offload_in_backward=true" in moved[0]
    assert "actor.lora.rank=32" in fits
    # Each is what it says.
    assert plan(*words, "actor.offload=optimizer", "actor.offload_in_backward=true") == 0
    assert plan(*words, "actor.offload=none", "actor.lora.rank=32") == 0


def test_the_most_is_moved_where_nothing_less_fits(capsys):
    assert plan("model.path=Qwen2.5-32B", "--command") == 0
    out = capsys.readouterr().out
    assert "actor.offload=optimizer" in out and "actor.offload_in_backward=true" in out
    # Shorter responses need less, and get less.
    assert plan("model.path=Qwen2.5-32B", "rollout.max_response_tokens=8192", "--command") == 0
    out = capsys.readouterr().out
    assert "actor.offload=optimizer" in out and "in_backward" not in out
    # Without an offload the setting does nothing, as a run's check says.
    assert plan("model.path=Qwen2.5-0.5B", "actor.offload_in_backward=true") == 0
    assert "actor.offload=optimizer" in capsys.readouterr().out
    none = ["actor.offload=none", "actor.offload_in_backward=true"]
    assert plan("model.path=Qwen2.5-0.5B", *none) == 2
    assert "does not read it" in capsys.readouterr().err


def test_a_step_of_hours_is_warned_of(capsys):
    words = ["model.path=Qwen2.5-7B", "actor.tensor_parallel=4", "actor.recompute=none"]
    assert plan(*words, "rollout.tensor_parallel=4") == 0
    out = capsys.readouterr().out
    assert "warning: a step takes about" in out
    assert "algorithm.prompts_per_step=32" in out
    assert plan(*words, "rollout.tensor_parallel=4", "algorithm.prompts_per_step=32") == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "positions", "parameters"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 32768, 7_615_616_512),
        ("Qwen/Qwen2.5-Math-7B", 4096, 7_615_616_512),
        ("Qwen/Qwen2.5-7B", 131072, 7_615_616_512),
        ("Qwen/Qwen3-8B-Base", 32768, 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", 262144, 30_532_122_624),
        ("meta-llama/Llama-3.1-8B-Instruct", 131072, 8_030_261_248),
        ("Qwen/QwQ-32B", 40960, 32_763_876_352),
        ("agentica-org/DeepScaleR-1.5B-Preview", 131072, 1_777_088_000),
    ],
)
def test_a_version_has_its_own_positions(name, positions, parameters):
    spec = published_spec(name)
    assert (spec.max_positions, spec.num_parameters) == (positions, parameters)


def test_names_are_completed():
    assert published_name("qwen2.5-32") == "Qwen2.5-32B"
    assert published_name("Qwen/qwen2.5-7B-Instruct") == "Qwen2.5-7B-Instruct"
    assert published_name("Qwen2.5-Coder-7B") is None
    with pytest.raises(UserError, match=r"Qwen2\.5-7B, Qwen2\.5-72B"):
        published_name("Qwen2.5-7")
    assert read_named_model("Qwen2.5-7B-Instruct")[0] == "models/Qwen2.5-7B-Instruct"
    assert read_named_model("Qwen/Qwen2.5-7B-Instruct")[0] == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(UserError, match=r"did you mean Qwen3-8B\?"):
        read_named_model("Qwen3_8B")
    with pytest.raises(UserError, match=r"openai/gpt-oss-20b: architecture Gpt.* attention sinks"):
        read_named_model("openai/gpt-oss-20b")
    assert gpu_named("mi300").name == "mi300x"
    assert gpu_named("H20").name == "h20"
    with pytest.raises(UserError, match="a100-40, a100-80"):
        gpu_named("a100")
    with pytest.raises(UserError, match=r"did you mean h100\?"):
        gpu_named("hh100")
