"""Machines and model sizes that the tests of the settings share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlmath.checks.machine import Machine
from rlmath.errors import ModelError
from rlmath.model.spec import model_spec
from rlmath.weights.pieces import hf_shapes

CPU_MACHINE = Machine(
    gpus=0, torch_build="2.13.0+cpu", memory_bytes=24 * 2**30, disk_bytes=4000 * 2**30
)
GPU_MACHINE = Machine(gpus=8, torch_build="2.13.0", memory_bytes=1000 * 2**30)

# As published with DeepSeek-R1-Distill-Qwen-1.5B and -7B.
QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN_7B = QWEN_1_5B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def write_weights(file: Path, sizes: dict[str, Any]) -> None:
    """A file whose header names the tensors that a model of these sizes has, and nothing in it."""
    try:
        shapes = hf_shapes(model_spec(sizes))
    except ModelError:
        shapes = {}
    header = json.dumps(
        {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def write_model_folder(folder: Path, sizes: dict[str, Any]) -> Path:
    """A folder with what the checks look at: ``config.json`` and the other files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_weights(folder / "model.safetensors", sizes)
    return folder
