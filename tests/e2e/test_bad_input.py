"""Input that only shows once parts start: one message, exit code 2, nothing left running."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

from safetensors import safe_open

from tests.e2e.runs import marked_processes, quickstart_settings, rlmath


def test_a_part_that_cannot_start(material: Path, tmp_path: Path) -> None:
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


def test_a_malformed_row_is_named_by_file_line_and_field(material: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": "<|user|>What is 1 + 1?<|assistant|>", "solutions": ["2"]})
    file.write_text("\n".join([good] * 5 + ['{"prompt": "no answer"}', good]) + "\n")
    settings = [*quickstart_settings(material, tmp_path / "run"), f"data.train_paths=[{file}]"]
    run = rlmath("train", *settings)
    assert run.returncode == 2, run.stderr
    assert "bad.jsonl" in run.stderr and "6" in run.stderr and "solutions" in run.stderr
    assert "Traceback" not in run.stderr
