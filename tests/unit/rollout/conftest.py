"""An engine on a GPU that it shares with a Megatron rank; nothing of it is started."""

from __future__ import annotations

import pytest

from rlmath.rollout.requests import EngineSpec


@pytest.fixture
def gpu_spec() -> EngineSpec:
    return EngineSpec(
        model_path="model",
        dtype="bfloat16",
        device="cuda",
        tensor_parallel=1,
        max_sequence_tokens=400,
        max_running_sequences=256,
        transport="ipc",
        log_dir="logs",
        sleeps=True,
    )
