"""What a platform says of itself."""

from __future__ import annotations

import pytest

from rlmath import device
from rlmath.device import CPU, Platform


@pytest.mark.parametrize("installed", [True, False])
def test_triton_runs_on_gpus_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: object() if installed else None)
    assert Platform("cuda", "nccl", "transformer_engine").runs_triton == installed
    assert not CPU.runs_triton
    # The rank of a dry run believes that it is on a GPU, and computes nothing.
    assert not Platform("cuda", "fake", "local").runs_triton  # type: ignore[arg-type]
