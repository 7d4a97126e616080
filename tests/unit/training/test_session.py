"""What settings say of the ranks' model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.model.published import KNOWN
from rlmath.training.session import actor_settings


@pytest.mark.parametrize("logits", ["auto", "whole", "chunked"])
def test_the_ranks_are_told_how_to_take_logits(logits: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen2.5-1.5B"]))
    given = [f"model.path={tmp_path}", "data.train_paths=[x]", f"runner.run_dir={tmp_path}"]
    config = load([*given, "cluster.device=cpu", f"actor.logits={logits}"])
    layout = resolve_layout(config, Device.cpu)
    settings = actor_settings(config, layout, config.actor.optimizer, 1, 1.0)
    assert settings.model.logits == logits
