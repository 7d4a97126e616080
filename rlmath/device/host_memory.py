"""Host memory that a GPU reads and writes by itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def pinned_buffer(num_bytes: int) -> Tensor:
    """``[num_bytes]`` uint8 of page-locked host memory, of exactly that size.

    torch's own pinned allocator rounds up to a power of two, which would take up to twice the
    memory of an optimizer's state.

    Raises:
        RuntimeError: The memory cannot be locked; the message says how much was asked for.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if not num_bytes:
        return buffer
    runtime: Any = torch.cuda.cudart()
    address = buffer.data_ptr()
    error = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(error):
        raise RuntimeError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be page-locked for actor.offload "
            f"(CUDA error {int(error)}): see ulimit -l and the node's free memory"
        )
    # The buffer's own memory is freed after this.
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
