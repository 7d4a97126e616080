"""The converter's console command never deletes what is not a model."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.errors import UserError

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_with_other_files_is_refused_with_exit_2(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("tool", "arguments", "setting"),
    [
        ("convert_checkpoint", "to-hf checkpoint folder --model x", "model.path="),
        ("convert_checkpoint", "to-megatron model checkpoint --dtype float32", "model.dtype="),
        (
            "decontaminate",
            "a.jsonl --against b.jsonl --to c.jsonl --prompt-key x",
            "data.prompt_key=",
        ),
        ("validate_logprobs", "model --tp=2", "actor.tensor_parallel="),
    ],
)
def test_an_option_that_is_a_setting_now_is_named(
    tool: str, arguments: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "toolkits"))
    with pytest.raises(UserError, match=rf"is a setting now; give {re.escape(setting)}"):
        importlib.import_module(tool).main(arguments.split())
