"""Page-locked memory: of exactly the size that is asked for, and given back."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from rlmath.device import CPU
from rlmath.device.host_memory import pinned_buffer


def test_a_buffer_is_locked_for_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=lambda address: locked.pop(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = pinned_buffer(1000)
    assert locked == {buffer.data_ptr(): 1000}
    del buffer
    gc.collect()
    assert not locked
    assert pinned_buffer(0).numel() == 0 and not locked, "nothing is locked for nothing"


def test_memory_that_cannot_be_locked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RuntimeError, match=r"2\.0 GiB .* actor\.offload \(CUDA error 2\)"):
        pinned_buffer(2**31)


def test_a_cpu_locks_nothing_and_counts_no_device() -> None:
    assert CPU.host_buffer(10).shape == (10,)
    assert CPU.reserved_bytes() is None and CPU.bytes_of_others() is None
