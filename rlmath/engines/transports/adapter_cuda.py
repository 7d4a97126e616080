"""vLLM's ``nccl`` transport, for adapters instead of weights; ``ipc`` has its own engine side."""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rlmath.engines.transports.adapter_engine import ReceivesAdapters


class NcclAdapters(ReceivesAdapters, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives from other GPUs."""
