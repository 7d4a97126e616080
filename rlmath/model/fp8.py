"""FP8 (e4m3) as engines with ``rollout.quantization=fp8`` compute: one rule for both sides.

A matrix has a scale for each of its rows (output channels), and the input of a product one for each
token; each is the largest absolute value over 448, the largest number of e4m3. This is vLLM's
``fp8_per_channel`` (``model_executor/layers/quantization/online/fp8.py``), which the tests compare
bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# The least scale is that over 512, so that rows of zeros divide.
_STEPS = 512


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
