"""A model's folder and a data file with which settings pass every check."""

import json

import pytest
from config_cases import QWEN_1_5B, write_model_folder


@pytest.fixture
def make_model(tmp_path):
    def make(sizes=QWEN_1_5B, name="model"):
        return write_model_folder(tmp_path / name, sizes)

    return make


@pytest.fixture
def make_data(tmp_path):
    def make(*rows, name="train.jsonl", text=None):
        file = tmp_path / name
        rows = rows or ({"prompt": "What is 1 + 1?", "solutions": ["\\boxed{2}"]},)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) if text is None else text)
        return file

    return make
