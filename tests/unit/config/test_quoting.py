"""Paths as overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import load
from rlmath.config.quoting import path_override, quoted_path

NAMES = ["plain", "a b", "a{b}", "{name}", "a,b", "a=b", "a'b", 'a"b', "a#b", "a:b", "a$b", "(a)"]
NAMES += ["a[b]", "ä", "a%b", "~a", "@a", "a+b", "-a", "<a>", "a  b", "a\\b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_read_back(name: str) -> None:
    path = Path("/models", name)
    config = load(
        [
            path_override("model.path", path),
            path_override("runner.run_dir", path),
            f"data.train_paths=[{quoted_path(path)},b.jsonl]",
        ]
    )
    assert config.model.path == str(path)
    assert config.data.train_paths == [str(path), "b.jsonl"]


def test_a_path_that_needs_no_quotes_has_none() -> None:
    assert path_override("model.path", "/a-b/c_1.d/e f") == "model.path=/a-b/c_1.d/e f"
