"""Every module that a run on GPUs loads can be imported with the CUDA wheels."""

from __future__ import annotations

import pytest

from tests.cuda_wheels.programs import answer_of


@pytest.mark.parametrize(("which", "at_least"), [("project", 280), ("vllm", 40), ("training", 40)])
def test_modules_import(which: str, at_least: int) -> None:
    answer = answer_of("imports_program", which)
    assert answer["failed"] == {}
    assert answer["modules"] >= at_least
