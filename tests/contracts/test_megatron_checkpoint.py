"""What checkpoints rely on in the installed Megatron-core, and what breaks when it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rlmath.actor import parallel
from rlmath.actor.parallel import Layout
from rlmath.device import Platform


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_no_gloo_group_is_made_beside_megatrons_own(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Each of them costs every process a thread and a rendezvous, and nothing uses them: optimizer
    and checkpoints are built without (``use_gloo_process_groups=False``, a group of their own)."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **k: given.update(k))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    platform = Platform("cuda", backend, "local")  # type: ignore[arg-type]
    parallel.initialize(Layout(2, 1, 4), platform, 1, "127.0.0.1", 1, seed=0)
    assert given["create_gloo_process_groups"] is False
