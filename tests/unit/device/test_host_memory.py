"""Page-locked memory: pages that no other buffer has, given back with it."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from rlmath.device import CPU, host_memory
from rlmath.device.host_memory import host_copies, pinned_buffer


def test_a_buffer_is_locked_for_its_life(monkeypatch):
    locked = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=lambda address: locked.pop(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [pinned_buffer(1000), pinned_buffer(1000), pinned_buffer(mmap.PAGESIZE + 1)]
    begins = [buffer.data_ptr() for buffer in buffers]
    sizes = [mmap.PAGESIZE, mmap.PAGESIZE, 2 * mmap.PAGESIZE]
    assert locked == dict(zip(begins, sizes, strict=True))
    # No page is locked twice, which CUDA refuses, and each buffer lies in its own memory.
    pages = [
        page for begin, size in locked.items() for page in range(begin, begin + size, mmap.PAGESIZE)
    ]
    assert len(set(pages)) == 4 and not any(page % mmap.PAGESIZE for page in pages)
    for buffer in buffers:
        end = buffer.storage_offset() + locked[buffer.data_ptr()]
        assert end <= buffer.untyped_storage().nbytes()
    del buffer, buffers
    gc.collect()
    assert not locked
    assert pinned_buffer(0).numel() == 0 and not locked, "nothing is locked for nothing"


def test_unlockable_host_memory_is_an_error(monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RuntimeError, match=r"2\.0 GiB .* actor\.offload \(CUDA error 2\)"):
        pinned_buffer(2**31)


def test_a_cpu_locks_nothing_and_counts_no_device():
    assert CPU.host_buffer(10).shape == (10,)
    assert CPU.reserved_bytes() is None and CPU.bytes_of_others() is None


@pytest.mark.parametrize("staging_bytes", [2, 64, 1 << 20])
def test_a_copy_by_way_of_a_buffer_has_every_byte(staging_bytes):
    staging = torch.empty(staging_bytes, dtype=torch.uint8)
    for source in (
        torch.randn(33, 7),
        torch.randn(33, 7).t()[1:],
        torch.randn(101).bfloat16(),
        torch.tensor(3.5),
        torch.empty(0, 4),
    ):
        copy = torch.empty(source.shape, dtype=source.dtype)
        host_memory._staged_copy(source, copy, staging)
        assert copy.dtype == source.dtype and torch.equal(copy, source)
        assert not copy.numel() or copy.data_ptr() != source.data_ptr()


def test_copies_of_host_tensors_lock_no_memory_and_are_independent(monkeypatch):
    monkeypatch.setattr(host_memory, "pinned_buffer", None)
    sources = [torch.ones(3), torch.ones(2, 2).bfloat16()]
    copies = list(host_copies(sources, lambda shape, dtype: torch.empty(shape, dtype=dtype)))
    for source in sources:
        source.zero_()
    assert [float(copy.float().sum()) for copy in copies] == [3.0, 4.0]
