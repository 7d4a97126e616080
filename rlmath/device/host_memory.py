"""Page-locked host memory, which a GPU reads and writes directly."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Size of one copy from a GPU.
STAGING_BYTES = 64 * 2**20


def host_copies(
    tensors: Iterable[Tensor], empty: Callable[[Sequence[int], torch.dtype], Tensor]
) -> Iterator[Tensor]:
    """Copies in pageable host memory, one after another.

    A GPU copies to pageable memory through a small buffer of CUDA, at a few GB/s. This
    copies to a page-locked buffer at the link's rate, and from there on the host.

    Args:
        tensors: On any device; host tensors are copied as well.
        empty: Makes an uninitialized tensor of a shape and type in host memory.
    """
    staging: Tensor | None = None
    for tensor in tensors:
        source = tensor.detach()
        copy = empty(source.shape, source.dtype)
        if source.device.type == "cuda":
            if staging is None:
                staging = pinned_buffer(STAGING_BYTES)
            _staged_copy(source, copy, staging)
        else:
            copy.copy_(source)
        yield copy


def _staged_copy(source: Tensor, copy: Tensor, staging: Tensor) -> None:
    """Copy by way of ``staging``, ``[bytes]`` uint8."""
    theirs = source.contiguous().view(-1).view(torch.uint8)
    ours = copy.view(-1).view(torch.uint8)
    for begin in range(0, theirs.numel(), staging.numel()):
        size = min(staging.numel(), theirs.numel() - begin)
        # Blocking: the host reads the buffer next.
        staging[:size].copy_(theirs[begin : begin + size])
        ours[begin : begin + size].copy_(staging[:size])


def pinned_buffer(num_bytes: int) -> Tensor:
    """``[num_bytes]`` uint8 of page-locked host memory, on pages that no other buffer shares.

    torch's own pinned allocator rounds up to a power of two, which would take up to twice the
    memory of an optimizer's state. Whole pages are locked, and CUDA refuses to lock one twice, so
    no other buffer may begin or end on them. Raises RuntimeError: the memory cannot be locked; the
    message gives the size requested.
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
