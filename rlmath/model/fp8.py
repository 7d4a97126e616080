"""FP8 (e4m3) as computed by engines with ``rollout.quantization=fp8``, and as stored in their KV
cache with ``rollout.kv_cache_dtype=fp8``: one rule for both sides.

A matrix has a scale per row (output channel), and the input of a product has one per token; a scale
is the largest absolute value divided by 448, the largest e4m3 number. This is vLLM's
``fp8_per_channel`` (``model_executor/layers/quantization/online/fp8.py``), which the tests compare
bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# The smallest scale is 1 / (448 * 512), so rows of zeros can be divided.
_STEPS = 512


@dataclass(frozen=True)
class InFp8:
    matrices: bool = False  # Products of layers (rollout.quantization).
    kv_cache: bool = False  # Keys and values (rollout.kv_cache_dtype).

    def __bool__(self) -> bool:
        return self.matrices or self.kv_cache


NOTHING = InFp8()


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to FP8. ``rows``: ``[..., n]``, float32 or bfloat16. Returns ``[..., n]`` e4m3,
    and their float32 scales ``[..., 1]``."""
    largest = rows.abs().amax(-1, keepdim=True).float()
    divisor = torch.tensor(LARGEST, device=rows.device)
    scale = (largest / divisor).clamp_min(1.0 / (divisor * _STEPS))
    return (rows / scale).clamp(-LARGEST, LARGEST).to(DTYPE), scale


def round_values(rows: Tensor) -> Tensor:
    """Round values to FP8 and back, in their own type."""
    values, scale = quantize(rows)
    return (values.float() * scale).to(rows.dtype)


def round_cached(values: Tensor) -> Tensor:
    """Round keys or values like an FP8 KV cache without a scale (``rollout.kv_cache_dtype=fp8``).

    The type is kept; values beyond the largest number are clamped to it.

    A GPU rounds to the nearest number; vLLM's CPU kernels truncate the lower bits.
    """
    held = values.clamp(-LARGEST, LARGEST).to(DTYPE)
    if values.device.type == "cpu":
        bits = held.view(torch.uint8)
        held = torch.where(held.float().abs() > values.float().abs(), bits - 1, bits).view(DTYPE)
    return held.to(values.dtype)
