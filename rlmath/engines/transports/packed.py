"""Read back, exactly, the matrices that vLLM's CPU kernels packed.

A dense matrix is packed inside oneDNN, which exposes no tensor. Its product with the identity
returns every element: one factor is 1, the others are 0, so nothing is rounded. Experts are packed
by moving elements, as are convolutions. Packing their indices in the same way shows where each
element went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlmath.weights.slices import Columns

# Columns of a matrix that are read at once.
_COLUMNS = 256


def is_packed(module: Any, key: str) -> bool:
    """Whether vLLM left an empty tensor in place of a packed parameter."""
    return key == "weight" and not getattr(module, key).numel() and hasattr(module, "cpu_linear")


@torch.inference_mode()
def columns_of(
    module: Any, count: int, dtype: torch.dtype, chosen: Columns | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The matrix that a layer multiplies with, a few columns at a time.

    Args:
        module: A packed linear or output layer of vLLM on CPU.
        count: Number of columns of its matrix, the input size.
        dtype: Type of its input.
        chosen: Only these columns; ``None``: all.

    Yields:
        First column, and the columns ``[rows, up to 256]``. A negative zero is returned as zero.
    """
    low, high = chosen or (0, count)
    for first in range(low, high, _COLUMNS):
        width = min(_COLUMNS, high - first)
        probe = torch.zeros(width, count, dtype=dtype)
        probe.diagonal(first).fill_(1)
        yield first, module.cpu_linear(probe, module.weight, None).t()


@torch.inference_mode()
def unpack(packed: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Tensors in the order before vLLM packed them.

    Args:
        packed: ``[n, ...]``, all packed alike, in the shape from before.
        pack: Packs ``[1, ...]``.

    Returns:
        The same shape; ``None`` if packing does more than move elements.
    """
    one = packed[:1]
    words = {2: torch.int16, 4: torch.int32}.get(packed.element_size())
    if words is None:
        return None
    # An index may need more bits than an element has, so its halves are sent one after the other.
    place = torch.arange(one.numel()).reshape(one.shape)
    halves = [
        pack((half - 2**15).to(words).view(packed.dtype)).view(words).long() + 2**15
        for half in (place % 2**16, place // 2**16)
    ]
    source = (halves[0] + 2**16 * halves[1]).reshape(-1)
    seen = torch.zeros_like(source, dtype=torch.bool)
    if source.min() < 0 or source.max() >= source.numel():
        return None
    seen[source] = True
    if not seen.all():
        return None
    flat = packed.reshape(packed.shape[0], -1)
    return torch.empty_like(flat).index_copy_(1, source, flat).reshape(packed.shape)


def is_packed_convolution(module: Any) -> bool:
    """Whether vLLM packed the weight of a layer's causal convolution."""
    return hasattr(module, "_cpu_unpacked_conv_weight")


def unpacked_convolution(module: Any) -> Tensor:
    """``[channels, 1, width]``: the weight that such a layer computes with.

    Raises:
        RuntimeError: Packing does more than move elements.
    """
    from vllm import _custom_ops as ops

    # vLLM's copy from before packing, which nothing computes with, has the shape.
    channels, width = module._cpu_unpacked_conv_weight.shape
    packed = module.weight.data.reshape(1, channels, width)
    found = unpack(packed, lambda one: ops.causal_conv1d_weight_pack(one[0]))
    if found is None:
        raise RuntimeError("vLLM packs convolutions in another way than by moving elements")
    return found.view(channels, 1, width)
