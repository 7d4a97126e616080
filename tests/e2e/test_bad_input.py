"""Input that only shows once parts start: one message, exit code 2, nothing left running."""

import json
import shutil
import uuid

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.e2e.runs import marked_processes, python, quickstart_settings, rlmath

# The console command, for which every model is a large one.
LARGE = (
    "import sys; from rlmath.checks import weight_values; weight_values.LIMIT_BYTES = 1; "
    "from rlmath.cli import main; sys.exit(main(sys.argv[1:]))"
)


# Proven apart: an engine that cannot start, in tests/engine/test_faults.py; one message, code 2
# and nothing left, of a run on a full disk in tests/faults.
@pytest.mark.long
def test_a_part_that_cannot_start(material, tmp_path):
    """An index that names the wrong file: found by a rank or an engine, reported as one error."""
    model = tmp_path / "model"
    shutil.copytree(material / "model", model)
    (model / "model.safetensors").rename(model / "model-1-of-2.safetensors")
    with safe_open(model / "model-1-of-2.safetensors", "pt") as file:
        where = dict.fromkeys(file.keys(), "model-1-of-2.safetensors")
    where["model.norm.weight"] = "model-2-of-2.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (model / "model-2-of-2.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    mark = uuid.uuid4().hex
    settings = [*quickstart_settings(material, tmp_path / "run"), f"model.path={model}"]
    settings.append("actor.tensor_parallel=1")
    run = rlmath("train", *settings, mark=mark)
    assert run.returncode == 2, run.stderr
    assert "error:" in run.stderr and "Traceback" not in run.stderr.split("---")[0]
    assert "model.norm.weight" in run.stderr
    assert not marked_processes(mark)


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "sft", "evaluate"])
def test_nan_in_a_weight_of_a_large_model(command, material, tmp_path):
    """The rank that reads it, or without ranks the first response, ends the run with one message;
    nothing is started again."""
    model = tmp_path / "model"
    shutil.copytree(material / "model", model)
    tensors = load_file(model / "model.safetensors")
    # In the last columns, which only the second tensor rank has.
    tensors["model.layers.3.mlp.down_proj.weight"][2, -1] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    mark = uuid.uuid4().hex
    settings = [*quickstart_settings(material, tmp_path / "run"), f"model.path={model}"]
    settings += [f"sft.train_paths=[{material / 'data' / 'sft.jsonl'}]", "actor.tensor_parallel=2"]
    run = python("-c", LARGE, command, *settings, mark=mark)
    assert run.returncode == 2, run.stderr
    (message,) = [line for line in run.stderr.splitlines() if "error:" in line]
    assert "model.layers.3.mlp.down_proj.weight in " in message and "NaN or infinity" in message
    assert "Traceback" not in run.stderr and "restart" not in run.stdout
    assert not marked_processes(mark)
