"""Page-locked host memory, which a GPU reads and writes directly."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor


def pinned_buffer(num_bytes: int) -> Tensor:
    """``[num_bytes]`` uint8 of page-locked host memory, on pages that no other buffer shares.

    torch's own pinned allocator rounds up to a power of two, which would take up to twice the
    memory of an optimizer's state. What is locked are whole pages, and CUDA refuses to lock one
    twice: no other buffer may begin or end on them.

    Raises:
        RuntimeError: The memory cannot be locked; the message says how much was asked for.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    whole = torch.empty(num_bytes + 2 * mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    begin = -whole.data_ptr() % mmap.PAGESIZE
    buffer = whole[begin : begin + num_bytes]
    runtime: Any = torch.cuda.cudart()
    address, pages = buffer.data_ptr(), -(-num_bytes // mmap.PAGESIZE)
    error = runtime.cudaHostRegister(address, pages * mmap.PAGESIZE, 0)
    if int(error):
        raise RuntimeError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked for actor.offload "
            f"(CUDA error {int(error)}): see ulimit -l and the node's free memory"
        )
    # The buffer's own memory is freed after this.
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
