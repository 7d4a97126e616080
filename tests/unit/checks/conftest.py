"""A model's folder and a data file with which settings pass every check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import QWEN_1_5B, write_model_folder


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(sizes: dict[str, Any] = QWEN_1_5B, name: str = "model") -> Path:
        return write_model_folder(tmp_path / name, sizes)

    return make


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., Path]:
    def make(*rows: dict[str, Any], name: str = "train.jsonl", text: str | None = None) -> Path:
        file = tmp_path / name
        rows = rows or ({"prompt": "What is 1 + 1?", "solutions": ["\\boxed{2}"]},)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) if text is None else text)
        return file

    return make
