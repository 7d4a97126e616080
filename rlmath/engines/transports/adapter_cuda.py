"""vLLM's own CUDA transports, for adapters instead of weights."""

from __future__ import annotations

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rlmath.engines.transports.adapter_engine import ReceivesAdapters


class IpcAdapters(ReceivesAdapters, IPCWeightTransferEngine):  # type: ignore[misc]
    """Receives from the GPU that the engine shares with the actor."""

    def finish_weight_update(self) -> None:
        """Release the trainer's buffer."""
        self._packed_importer.close()


class NcclAdapters(ReceivesAdapters, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives from other GPUs."""
