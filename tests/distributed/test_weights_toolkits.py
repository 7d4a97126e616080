"""The offline tools as a person runs them, with a real vLLM engine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.model.tiny import make_tiny_model
from tests.support.models import make_for_engines

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugins" / "model_family.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tie_word_embeddings=True)


def run(tool, *arguments):
    command = [sys.executable, str(ROOT / "toolkits" / tool), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )


def rename_architecture(model, folder):
    """The model with the architecture of ``examples/plugins/model_family.py``."""
    shutil.copytree(model, folder)
    fields = json.loads((folder / "config.json").read_text())
    text = json.dumps(fields | {"architectures": ["MyQwen2ForCausalLM"]})
    (folder / "config.json").write_text(text)
    return folder


MOE = ("glm4_moe", "deepseek_v3_in_vllm")


@pytest.mark.parametrize(
    "family",
    [
        # The tiny model by the name of a plug-in's architecture.
        "plugin",
        # An engine each; with transformers all are compared in test_weights.py.
        *[
            pytest.param(name, marks=pytest.mark.long)
            for name in ("yarn", "phi3", "mistral", "olmo3", *MOE)
        ],
    ],
)
def test_megatron_transformers_and_vllm_agree(model, tmp_path, family):
    plugins = [f"plugins=[{PLUGIN}]"] if family == "plugin" else []
    if plugins:
        model = rename_architecture(model, tmp_path / family)
    else:
        model = make_for_engines(family, tmp_path / family, scale=0.1, max_positions=128)
    data = tmp_path / "responses.jsonl"
    rows = [("What is 1 + 2?", "1 + 2 = \\boxed{3}"), ("Add 17 and 25: ", "42, for 10 + 20 is 30.")]
    data.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows))
    layout = ["actor.tensor_parallel=2", *plugins, "--data", data]
    if family in MOE:
        layout[1:1] = ["actor.expert_parallel=2", "actor.sequence_parallel=true"]
    done = run("validate_logprobs.py", model, *layout, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["good"]
    assert [c["names"] for c in report["comparisons"]] == [
        ["megatron", "transformers"],
        ["megatron", "vllm"],
    ]
    for comparison, limit in zip(report["comparisons"], (2e-5, 1e-4), strict=True):
        assert comparison["max_abs_diff"] < limit
        assert comparison["pearson"] > 0.9999
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "megatron - vllm" in done.stdout


def test_toolkit_errors_are_one_message(model, tmp_path):
    data = tmp_path / "responses.jsonl"
    data.write_text('{"prompt": "no response"}\n')
    done = run("validate_logprobs.py", model, "--data", data, "--no-vllm")
    assert done.returncode == 2
    assert f"error: {data}:1: no prompt and response" in done.stderr
    done = run("validate_logprobs.py", model, "actor.tensor_parallel=3", "--no-vllm")
    assert done.returncode == 2
    assert "actor.tensor_parallel=3: the model does not divide so" in done.stderr
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    done = run("convert_checkpoint.py", "to-megatron", broken, tmp_path / "checkpoint")
    assert done.returncode == 2
    assert f"error: {broken}: model.norm.weight in " in done.stderr
    assert "holds NaN" in done.stderr
    done = run("convert_checkpoint.py", "to-hf", tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert "is no checkpoint" in done.stderr


# Conversion without plug-ins: test_checkpoint.py and test_weights.py.
@pytest.mark.long
def test_a_model_of_a_plugins_family_is_converted_there_and_back(model, tmp_path):
    mine, run_dir = tmp_path / "family.py", tmp_path / "run"
    shutil.copy(PLUGIN, mine)
    source, checkpoint = (
        rename_architecture(model, tmp_path / "source"),
        run_dir / "checkpoints" / "step_1",
    )
    there = ["to-megatron", source, checkpoint, "model.dtype=float32"]
    done = run("convert_checkpoint.py", *there)
    assert done.returncode == 2 and "MyQwen2ForCausalLM is not supported" in done.stderr
    done = run("convert_checkpoint.py", *there, f"plugins=[{mine}]")
    assert done.returncode == 0, done.stdout + done.stderr
    # The run's settings name the plug-in.
    (run_dir / "config.yaml").write_text(f"plugins: [{mine}]\nmodel: {{path: {source}}}\n")
    back = ["to-hf", checkpoint, tmp_path / "back", "--no-vllm"]
    done = run("convert_checkpoint.py", *back)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (load_file(one / "model.safetensors") for one in (source, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    mine.unlink()
    done = run("convert_checkpoint.py", *back, "--overwrite")
    assert done.returncode == 2 and f"{mine}: no such file" in done.stderr
    assert done.stderr.count("error: ") == 1
