"""Machines and model sizes that the tests of the settings share."""

import json

from rlmath.checks.machine import Machine
from rlmath.errors import ModelError
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.weights.pieces import hf_shapes

CPU_MACHINE = Machine(
    gpus=0, torch_build="2.13.0+cpu", memory_bytes=24 * 2**30, disk_bytes=4000 * 2**30
)
GPU_MACHINE = Machine(gpus=8, torch_build="2.13.0", memory_bytes=1000 * 2**30)

QWEN_1_5B = KNOWN["DeepSeek-R1-Distill-Qwen-1.5B"]
QWEN_7B = KNOWN["DeepSeek-R1-Distill-Qwen-7B"]


def set_values(config, changes):
    """Set settings by their keys, ``actor.lora.rank``."""
    for key, value in changes.items():
        *path, last = key.split(".")
        section = config
        for name in path:
            section = getattr(section, name)
        setattr(section, last, value)


def write_weights(file, sizes):
    """A file whose header names the tensors that a model of these sizes has, and nothing in it."""
    try:
        shapes = hf_shapes(model_spec(sizes))
    except ModelError:
        shapes = {}
    header = json.dumps(
        {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def write_model_folder(folder, sizes):
    """A folder with what the checks look at: ``config.json`` and the other files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_weights(folder / "model.safetensors", sizes)
    return folder
