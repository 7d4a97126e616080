import json

import pytest

from rlmath.cli import main
from rlmath.config.load import load, save
from rlmath.monitor.summary import update_summary
from rlmath.training.model_card import model_card, write_card


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "mine"
    overrides = ["experiment=qwen2.5-1.5b-grpo-megatron", f"runner.run_dir={folder}"]
    overrides += ["data.train_paths=[x/dapo.jsonl,x/gsm8k.jsonl]", "data.train_weights=[3,1]"]
    save(load(overrides), folder / "config.yaml")
    update_summary(folder, {"steps": 70, "eval/accuracy_before": 0.25, "eval/accuracy_after": 0.5})
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    return folder


def test_the_card_has_recipe_data_and_results(run_dir):
    metrics = {"accuracy": 0.3, "accuracy_standard_error": 0.05, "response_length": 812.0}
    metrics |= dict.fromkeys(("pass_at_4", "maj_at_4"), 0.6)
    shares = ("truncated", "no_answer", "bad_gold", "timeout", "error", "ungraded")
    metrics |= {f"{name}_share": 0.0 for name in shares}
    entry = {"problems": 30, "settings": {"samples": 4}, "metrics": metrics}
    (run_dir / "evaluation").mkdir()
    results = {"model": "m", "benchmarks": {"aime24": entry}}
    (run_dir / "evaluation" / "results.json").write_text(json.dumps(results))
    write_card(run_dir)
    card = (run_dir / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "DeepSeek-R1-Distill-Qwen-1.5B, trained" in card
    assert "after step 70" in card
    assert "| samples per prompt | 16 |" in card
    assert "| clip, low and high | 0.2, 0.2 |" in card
    assert "- training: `dapo.jsonl`, weight 3" in card
    assert "from 0.250 to 0.500" in card
    assert "30.0 ± 5.0" in card
    assert "max_tokens_per_microbatch" in card
    # The run's folder is an absolute path.
    assert "run_dir: mine" in card and str(run_dir.parent) not in card
    assert "- x/dapo.jsonl" in card


def test_a_checkpoints_card_has_its_own_figures(run_dir):
    folder = run_dir / "checkpoints" / "step_000050"
    folder.mkdir(parents=True)
    manifest = {"metrics": {"eval/accuracy": 0.4, "train/loss": 1.0}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    card = model_card(run_dir, step=50)
    assert "after step 50" in card
    assert "`eval/accuracy`: 0.4000" in card
    assert "train/loss" not in card.split("## All settings")[0]


def test_a_card_for_every_checkpoint(run_dir, capsys):
    every = ["publish", str(run_dir), "me/mine", "--every-checkpoint", "--card-only"]
    assert main(every) == 2
    assert "there is none in" in capsys.readouterr().err
    for step in (50, 100):
        (run_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert main(every) == 0
    out = capsys.readouterr().out
    assert out.index("after step 50.") < out.index("after step 100.")
    assert main([*every, "--revision", "main"]) == 2
    assert "each has its own branch" in capsys.readouterr().err


def test_publish_names_missing_files(run_dir, tmp_path, capsys, monkeypatch):
    assert main(["publish", str(tmp_path), "me/mine"]) == 2
    assert "no config.yaml" in capsys.readouterr().err
    assert main(["publish", str(run_dir), "me/mine", "--card-only"]) == 0
    assert "## Recipe" in capsys.readouterr().out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["publish", str(run_dir), "me/mine"]) == 2
    assert "me/mine at main could not be published" in capsys.readouterr().err
    assert not list(run_dir.glob(".publish_*"))
    (run_dir / "hf" / "config.json").unlink()
    assert main(["publish", str(run_dir), "me/mine"]) == 2
    assert "give eval.checkpoint" in capsys.readouterr().err


def test_adapters_are_published_beside_the_model(run_dir, monkeypatch):
    seen = []

    def push(folder, *_, **__):
        seen.extend(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
        return "there"

    monkeypatch.setattr("rlmath.commands.publish.push", push)
    assert "LoRA rank and alpha" in model_card(run_dir)
    assert "hf_adapter" not in model_card(run_dir)
    (run_dir / "hf_adapter").mkdir()
    (run_dir / "hf_adapter" / "adapter_config.json").write_text("{}")
    assert "hf_adapter" in model_card(run_dir) and "hf_adapter" not in model_card(run_dir, step=3)
    assert main(["publish", str(run_dir), "me/mine"]) == 0
    assert "hf_adapter/adapter_config.json" in seen and "config.json" in seen


def test_a_model_is_published_to_a_new_folder(run_dir, tmp_path, capsys):
    target = tmp_path / "shared" / "mine"
    assert main(["publish", str(run_dir), str(target)]) == 0
    assert f"published: {target}" in capsys.readouterr().out
    assert sorted(file.name for file in target.iterdir()) == ["README.md", "config.json"]
    assert not any(file.is_symlink() for file in target.iterdir())
    assert main(["publish", str(run_dir), str(target)]) == 2
    assert "give a folder that is new or empty" in capsys.readouterr().err
