import json

import pytest
import torch
from config_cases import QWEN_1_5B, write_model_folder, write_weights
from safetensors.torch import save_file

from rlmath.checks.weight_files import (
    broken_json_files,
    broken_weight_files,
    tokenizer_misfit,
    weights_misfit,
)
from rlmath.model.spec import model_spec
from rlmath.weights.pieces import hf_shapes

SMALL_TIED = QWEN_1_5B | {
    "num_hidden_layers": 1,
    "hidden_size": 1024,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2_000,
    "tie_word_embeddings": True,
}


@pytest.fixture
def weights(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(3, 4)}, file, metadata={"format": "pt"})
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "is incomplete: header"),
        (lambda b: b + b"\0", "is incomplete: header"),
        (lambda b: b[:20], "is cut off"),
        (lambda b: b"", "is cut off"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (lambda b: b[:8] + b"?" + b[9:], "header cannot be read"),
    ],
)
def test_incomplete_weight_files_are_named(weights, change, message):
    weights.write_bytes(change(weights.read_bytes()))
    (problem,) = broken_weight_files(weights.parent)
    assert problem.startswith("model.safetensors ")
    assert message in problem


def test_weights_of_another_model_or_type_are_named(tmp_path):
    folder = write_model_folder(tmp_path, QWEN_1_5B)
    assert weights_misfit(folder) is None
    # Not the model's, and not read.
    write_weights(folder / "adapter.safetensors", QWEN_1_5B | {"num_hidden_layers": 40})
    assert weights_misfit(folder) is None
    write_weights(folder / "model.safetensors", QWEN_1_5B | {"intermediate_size": 8968})
    said = weights_misfit(folder) or ""
    assert "mlp.gate_proj.weight is (8968, 1536), config.json says (8960, 1536)" in said
    assert "and 79 more" in said  # 28 layers x 3 matrices, five of them named
    header = b'{"model.norm.weight": {"dtype": "I32", "shape": [1536], "data_offsets": [0, 0]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.norm.weight has type I32" in (weights_misfit(folder) or "")


@pytest.mark.parametrize("changed", [None, 0, 999_999, 2_047_999])
def test_a_tied_output_layer_that_differs_is_named(tmp_path, changed):
    """The first element, one in the middle, and the last."""
    folder = write_model_folder(tmp_path, SMALL_TIED)
    rows, columns = SMALL_TIED["vocab_size"], SMALL_TIED["hidden_size"]
    tensors = {
        name: torch.zeros(shape, dtype=torch.float32)
        for name, shape in hf_shapes(model_spec(SMALL_TIED)).items()
    }
    tensors["lm_head.weight"] = torch.zeros(rows, columns)
    if changed is not None:
        tensors["lm_head.weight"].view(-1)[changed] = 1.0
    save_file(tensors, folder / "model.safetensors")
    said = weights_misfit(folder)
    if changed is None:
        assert said is None
    else:
        assert said is not None and "tie_word_embeddings to false" in said


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(tmp_path):
    folder = write_model_folder(tmp_path, SMALL_TIED)
    rows = SMALL_TIED["vocab_size"]
    tokenizer = folder / "tokenizer.json"

    def write(vocabulary, added):
        content = {
            "model": {"vocab": vocabulary},
            "added_tokens": [{"id": added, "content": "<|tool|>"}],
        }
        tokenizer.write_text(json.dumps(content))

    write({"a": 0, "b": rows - 1}, added=5)
    assert tokenizer_misfit(folder) is None
    write({"a": 0, "b": rows}, added=5)
    assert f"ids up to {rows}, 'b', and the embedding has {rows} rows" in str(
        tokenizer_misfit(folder)
    )
    write([["a", 0.0]] * rows, added=rows + 2)
    assert f"ids up to {rows + 2}, '<|tool|>'" in str(tokenizer_misfit(folder))
    tokenizer.write_text("[]")
    assert tokenizer_misfit(folder) is None


def test_json_that_cannot_be_read_is_named(tmp_path):
    folder = write_model_folder(tmp_path, QWEN_1_5B)
    assert broken_json_files(folder) == []
    (folder / "generation_config.json").write_text("{")
    (problem,) = broken_json_files(folder)
    assert problem.startswith("generation_config.json cannot be read")
