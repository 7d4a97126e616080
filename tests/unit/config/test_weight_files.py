"""A weight file that is not whole is found before anything loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlmath.config.weight_files import broken_weight_files


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(3, 4)}, file, metadata={"format": "pt"})
    return file


def test_a_whole_file_is_fine(weights: Path) -> None:
    assert broken_weight_files(weights.parent) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "is not whole: header"),
        (lambda b: b + b"\0", "is not whole: header"),
        (lambda b: b[:20], "is cut off"),
        (lambda b: b"", "is cut off"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (lambda b: b[:8] + b"?" + b[9:], "header cannot be read"),
    ],
)
def test_what_is_not_whole_is_named(weights: Path, change: object, message: str) -> None:
    weights.write_bytes(change(weights.read_bytes()))  # type: ignore[operator]
    (problem,) = broken_weight_files(weights.parent)
    assert problem.startswith("model.safetensors ")
    assert message in problem
