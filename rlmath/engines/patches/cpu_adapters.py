"""One adapter's products on CPU, for the engines whose requests all have it.

vLLM 0.32 gathers a copy of ``A`` and ``B`` for each token of a step before it multiplies: a prompt
of 4,096 tokens takes 1.3 GB for one matrix of 4,864 columns at rank 16. With one adapter for all
tokens these are two matrix products.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper, with a fast path for steps in which all tokens have the same adapter."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """See vLLM's method. As there, ``A x`` is computed in float32."""
        if self.no_lora:
            return
        if self.batch_size != 1 or kwargs:
            super().add_lora_linear(
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs
            )
            return
        slot = int(self._lora_indices_per_batch[0])
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).float()
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = F.linear(x, a[slot, 0].float())
            y[:, start : start + width].addmm_(low.to(y.dtype), b[slot, 0].t(), alpha=scale)
            start += width
