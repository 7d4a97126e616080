"""FP8 (e4m3) as engines with ``rollout.quantization=fp8`` compute, and as they keep keys and values
with ``rollout.kv_cache_dtype=fp8``: one rule for both sides.

A matrix has a scale for each of its rows (output channels), and the input of a product one for each
token; each is the largest absolute value over 448, the largest number of e4m3. This is vLLM's
``fp8_per_channel`` (``model_executor/layers/quantization/online/fp8.py``), which the tests compare
bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# The least scale is that over 512, so that rows of zeros divide.
_STEPS = 512


@dataclass(frozen=True)
class InFp8:
    """What engines have in FP8.

    Attributes:
        matrices: Products of layers (``rollout.quantization``).
        kv_cache: Keys and values (``rollout.kv_cache_dtype``).
    """

    matrices: bool = False
    kv_cache: bool = False

    def __bool__(self) -> bool:
        return self.matrices or self.kv_cache


NOTHING = InFp8()


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8 and their scales.

    Args:
        rows: ``[..., n]``, float32 or bfloat16.

    Returns:
        ``[..., n]`` e4m3, and float32 ``[..., 1]`` by which to multiply it.
    """
    largest = rows.abs().amax(-1, keepdim=True).float()
    divisor = torch.tensor(LARGEST, device=rows.device)
    scale = (largest / divisor).clamp_min(1.0 / (divisor * _STEPS))
    return (rows / scale).clamp(-LARGEST, LARGEST).to(DTYPE), scale


def rounded(rows: Tensor) -> Tensor:
    """The same values after FP8, in their own type."""
    values, scale = quantized(rows)
    return (values.float() * scale).to(rows.dtype)


def cached(values: Tensor) -> Tensor:
    """Keys or values after a KV cache in FP8 without a scale (``rollout.kv_cache_dtype=fp8``), in
    their type; beyond the largest number they are that.

    A GPU rounds to the nearest number; vLLM's kernels for CPUs cut the lower bits off.
    """
    held = values.clamp(-LARGEST, LARGEST).to(DTYPE)
    if values.device.type == "cpu":
        bits = held.view(torch.uint8)
        held = torch.where(held.float().abs() > values.float().abs(), bits - 1, bits).view(DTYPE)
    return held.to(values.dtype)
