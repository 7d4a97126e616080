"""Folders that cannot be trained, through the console command: one message, no traceback, and the
cause by name."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlmath.checks import weight_values
from rlmath.cli import main
from rlmath.errors import UserError
from rlmath.model.spec import model_spec
from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE, fast_tokenizer
from rlmath.weights.pieces import hf_shapes

SIZES: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY_SIZE,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def write(folder: Path, sizes: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    fast_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    shapes = hf_shapes(model_spec(SIZES))
    save_file({n: torch.zeros(s) for n, s in shapes.items()}, folder / "model.safetensors")


def config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(SIZES | changes))


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def untied(folder: Path) -> None:
    shapes = hf_shapes(model_spec(SIZES))
    tensors = {name: torch.zeros(size) for name, size in shapes.items()}
    tensors["lm_head.weight"] = torch.ones(VOCABULARY_SIZE, 128)
    save_file(tensors, folder / "model.safetensors")


def two_sources(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "other.safetensors"}})
    )


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")


def not_a_number(folder: Path, dtype: torch.dtype = torch.float32, value: float = math.nan) -> None:
    shapes = hf_shapes(model_spec(SIZES))
    tensors = {name: torch.zeros(size, dtype=dtype) for name, size in shapes.items()}
    tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[-1] = value
    # Neither is the largest number one, nor counts what is not read.
    tensors["model.norm.weight"][3] = torch.finfo(dtype).max
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor([math.nan])
    save_file(tensors, folder / "model.safetensors")


def twice(folder: Path) -> None:
    """A tensor in both files, of which the index names the first."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    tensor = torch.ones(128)
    save_file({"model.norm.weight": tensor, "extra": tensor.clone()}, folder / "b.safetensors")
    names = hf_shapes(model_spec(SIZES))
    where = dict.fromkeys(names, "a.safetensors") | {"extra": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "tied with another output layer": (untied, "lm_head.weight in the files differs"),
    "one file beside an index": (two_sources, "has both model.safetensors and"),
    "an index that is no JSON": (lambda f: index(f, "{"), "model.safetensors.index.json"),
    "an index without weight_map": (lambda f: index(f, "{}"), "model.safetensors.index.json"),
    "an index that is a list": (lambda f: index(f, "[]"), "model.safetensors.index.json"),
    "an index with a number for a file": (
        lambda f: index(f, '{"weight_map": {"a": 3}}'),
        "model.safetensors.index.json",
    ),
    "NaN in a weight": (
        not_a_number,
        "model.layers.1.mlp.down_proj.weight in model.safetensors holds NaN or infinity",
    ),
    "a link to nothing": (dangling, "nowhere, where no file is"),
    "a tensor in two files": (twice, "model.norm.weight is in a.safetensors and b.safetensors"),
    "a Git LFS pointer for a tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1"),  # type: ignore[arg-type, return-value]
        "tokenizer.json is a Git LFS pointer",
    ),
    "a rope_theta that is text": (lambda f: config(f, rope_theta="x"), "rope_theta is 'x'"),
    "layer_types that is a number": (lambda f: config(f, layer_types=3), "layer_types is 3"),
    "layer_types of another length": (
        lambda f: config(f, layer_types=["full_attention"]),
        "layer_types has 1 entries for 2 layers",
    ),
    "a Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec"),  # type: ignore[arg-type, return-value]
        "is a Git LFS pointer, not the weights",
    ),
    "a LoRA adapter": (adapter, "a LoRA adapter of Qwen/Qwen3-8B, not a model: merge it with peft"),
    "a tokenizer with more ids than rows": (
        lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab": {"a": 300}}}'),  # type: ignore[arg-type, return-value]
        "ids up to 300, and the embedding has 261 rows",
    ),
    "dynamic rope": (
        lambda f: config(f, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rotary embedding of type dynamic; supported: default, linear",
    ),
    "an unknown rope": (
        lambda f: config(f, rope_scaling={"rope_type": "spiral"}),
        "rotary embedding of type spiral",
    ),
    "one expert per token": (
        lambda f: config(f, **QWEN3_MOE, num_experts_per_tok=1),
        "num_experts_per_tok is 1 with norm_topk_prob",
    ),
    "Qwen3 without head_dim": (
        lambda f: config(f, architectures=["Qwen3ForCausalLM"]),
        # Of 128, as transformers takes it, and not 128 / 4.
        "q_norm.weight (128,) is missing",
    ),
    "sliding windows": (lambda f: config(f, use_sliding_window=True), "use_sliding_window is true"),
    "windows of some layers": (
        lambda f: config(
            f,
            architectures=["MistralForCausalLM"],
            sliding_window=64,
            layer_types=["full_attention"] * 2,
        ),
        "transformers gives every layer the window",
    ),
    "layers of several types": (
        lambda f: config(f, layer_types=["full_attention", "sliding_attention"]),
        "layer_types has sliding_attention",
    ),
    "another family": (
        lambda f: config(f, architectures=["GptOssForCausalLM"]),
        "GptOssForCausalLM is not supported: of Megatron's attentions",
    ),
}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}) + "\n")

    def run(*settings: str, code: int = 2) -> str:
        given = ["cluster.device=cpu", f"data.train_paths=[{data}]", *settings]
        assert main(["train", *given, f"runner.run_dir={tmp_path / 'run'}", "--check"]) == code
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_trained(
    check: Callable[..., str], tmp_path: Path, case: str
) -> None:
    damage, words = CASES[case]
    write(tmp_path / "model", SIZES)
    damage(tmp_path / "model")
    message = check(f"model.path={tmp_path / 'model'}")
    assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_nan_and_infinity_of_each_type(
    check: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    value: float,
) -> None:
    write(tmp_path / "model", SIZES)
    # The last element is in a block that is not full.
    monkeypatch.setattr(weight_values, "_BLOCK_BYTES", 1000)
    not_a_number(tmp_path / "model", dtype, value)
    fine = value == 1.0
    settings = f"model.path={tmp_path / 'model'}", "rollout.max_response_tokens=64"
    message = check(*settings, code=0 if fine else 2)
    assert ("model.layers.1.mlp.down_proj.weight in model.safetensors" in message) is not fine


def test_values_of_large_models_are_left_to_the_ranks(
    check: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model", SIZES)
    not_a_number(tmp_path / "model")
    monkeypatch.setattr(weight_values, "LIMIT_BYTES", 1000)
    check(f"model.path={tmp_path / 'model'}", "rollout.max_response_tokens=64", code=0)


@pytest.mark.parametrize("tool", ["convert_checkpoint", "validate_logprobs"])
@pytest.mark.parametrize("case", [case for case in CASES if "shorter" not in case])
def test_the_tools_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, tool: str
) -> None:
    damage, words = CASES[case]
    write(tmp_path / "model", SIZES)
    damage(tmp_path / "model")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "toolkits"))
    model = str(tmp_path / "model")
    arguments = [model] if tool == "validate_logprobs" else ["to-megatron", model, model + "-new"]
    with pytest.raises(UserError, match=re.escape(words)):
        importlib.import_module(tool).main(arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_tensor_parallel_sizes_that_are_offered_are_taken(
    check: Callable[..., str], tmp_path: Path, ranks: int
) -> None:
    write(tmp_path / "model", SIZES)
    settings = f"model.path={tmp_path / 'model'}", f"actor.tensor_parallel={ranks}"
    if ranks in (1, 2, 4):
        check(*settings, "rollout.max_response_tokens=64", code=0)
        return
    message = check(*settings)
    assert f"actor.tensor_parallel={ranks}: the model does not divide so" in message
    assert "works: 1, 2 or 4" in message


def test_the_sizes_that_are_offered_for_experts_divide_them(
    check: Callable[..., str], tmp_path: Path
) -> None:
    """12 heads and experts of width 6: 4 ranks divide the heads alone, unless experts are whole."""
    changes = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 32}
    experts = QWEN3_MOE | {"moe_intermediate_size": 6, "num_experts_per_tok": 2}
    write(tmp_path / "model", SIZES)
    config(tmp_path / "model", **experts, **changes, intermediate_size=48)
    settings = f"model.path={tmp_path / 'model'}", "actor.tensor_parallel=5"
    assert "actor.tensor_parallel=5: the model does not divide so: 12 attention" in check(*settings)
    assert "works: 1, 2, 3 or 6" in check(*settings)
    whole = "actor.expert_parallel=4", "actor.data_parallel=4"
    assert "works: 1, 2, 3, 4, 6 or 12" in check(*settings, *whole)


@pytest.mark.parametrize(
    "setting",
    [
        "model.path=models/{name}",
        "model.path=models/<name>",
        'model.path="models/{name}"',
        "runner.run_dir=runs/{name}",
        "data.train_paths=[data/{name}.jsonl]",
    ],
)
def test_braces_that_were_not_filled_in(check: Callable[..., str], setting: str) -> None:
    message = check(setting)
    assert "name} was not filled in" in message or "name> was not filled in" in message
    assert message.count("\n") == 1
