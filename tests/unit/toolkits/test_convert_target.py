"""The converter's console command never deletes what is not a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_with_other_files_is_refused_with_exit_2(tmp_path):
    actor = tmp_path / "checkpoints" / "step_000001" / "actor"
    actor.mkdir(parents=True)
    about = {"shape": {"architecture": "Qwen2ForCausalLM"}, "dtype": "float32", "layout": {}}
    (actor / "about.json").write_text(json.dumps(about))
    source, target = tmp_path / "model", tmp_path / "papers"
    for folder in (source, target):
        folder.mkdir()
    (source / "config.json").write_text("{}")
    (target / "thesis.tex").write_text("mine")
    tool = [sys.executable, str(ROOT / "toolkits" / "convert_checkpoint.py"), "to-hf"]
    done = subprocess.run(
        [*tool, str(actor.parent), str(target), f"model.path={source}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "thesis.tex" in done.stderr and "--overwrite" in done.stderr
    assert "Traceback" not in done.stderr
    assert (target / "thesis.tex").read_text() == "mine"
