import dataclasses
from pathlib import Path

import pytest

from rlmath.checks.overwritten import overwritten_inputs
from rlmath.config.load import load


def settings(**changes):
    config = load(["experiment=quickstart"])
    for section, fields in changes.items():
        part = dataclasses.replace(getattr(config, section), **fields)
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.mark.parametrize(
    ("command", "key", "path"),
    [
        ("sft", "model.path", "r/sft"),
        ("train", "model.path", "r/hf"),
        ("train", "model.path", "linked/hf"),
        ("train", "teacher.path", "r/hf/teacher"),
        ("train", "data.train_paths[0]", "r/samples/step_1.jsonl"),
        ("evaluate", "model.path", "r/evaluation/model"),
    ],
)
def test_an_input_in_a_folder_that_is_replaced_is_named(command, key, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r").mkdir()
    Path("linked").symlink_to("r")
    section, _, name = key.partition("[")[0].partition(".")
    value = [path] if "[" in key else path
    sections = {"runner": {"run_dir": "r"}, section: {name: value}}
    if command == "evaluate":
        sections["eval"] = {"checkpoint": "r/checkpoints/step_000001"}
    found = list(overwritten_inputs(settings(**sections), command))
    assert len(found) == 1 and f"{key}={path}" in found[0] and "runner.run_dir" in found[0]
    sections["runner"] = {"run_dir": "other"}
    assert not list(overwritten_inputs(settings(**sections), command))


def test_files_of_other_commands_in_the_run_folder_are_inputs():
    for command, path in (("train", "r/sft"), ("train", "r/model"), ("evaluate", "r/hf")):
        config = settings(runner={"run_dir": "r"}, model={"path": path})
        assert not list(overwritten_inputs(config, command))
