"""The machine and the material that all checks share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rlmath.commands.plan.gpus import GPUS, Gpu

# ``rollout.gpu_memory_utilization`` of the checks: room for training state beside it.
ENGINE_SHARE = 0.3


@dataclass(frozen=True)
class Node:
    device: Literal["cpu", "cuda"]  # Device of ranks and engines.
    gpus: int  # GPUs that may be used; 0 on CPU.
    gpu_name: str  # As the driver calls them; "" on CPU.
    gpu_gib: float
    model: str  # Hugging Face folder of the model that is checked with.
    folder: str  # For the files of this check alone.

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """``model.dtype`` of the checks, as runs use it on this device."""
        return "bfloat16" if self.on_cuda else "float32"

    @property
    def card(self) -> Gpu | None:
        """The figures that plans are made with, with this card's own memory; ``None``: unknown."""
        words = self.gpu_name.lower().replace("-", " ").split()
        for name, gpu in GPUS.items():
            if name.split("-")[0] in words:
                return dataclasses.replace(gpu, memory_gib=self.gpu_gib)
        return None

    def gpus_up_to(self, most: int) -> int:
        """The largest power of two of GPUs, which divides batches and ranks; 0 on CPU."""
        usable = min(most, self.gpus)
        return 1 << (usable.bit_length() - 1) if usable else 0
