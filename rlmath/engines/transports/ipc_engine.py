"""Engine's side of ``ipc``: vLLM's, but it loads from the trainer's buffer and not from a copy.

The trainer writes a bucket only after the engine has loaded the one before the last, whose reads
vLLM's ``update_weights`` has waited for. What vLLM holds back for a later bucket is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)

from rlmath.engines.transports.adapter_engine import ReceivesAdapters
from rlmath.engines.transports.reload_pending import keep_pending


@dataclass
class IpcUpdateInfo(IPCWeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket: besides vLLM's fields, where each tensor begins in the buffer."""

    offsets_bytes: list[int] = field(default_factory=list)


class IpcEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Receives from the GPU that the engine shares with the actor."""

    update_info_cls = IpcUpdateInfo

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Load one bucket. When vLLM has synchronized the device, nothing reads the buffer."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        uuid = str(torch.cuda.get_device_properties(self.device.index).uuid)
        handles = update_info.ipc_handles
        assert isinstance(handles, dict), "the trainer packs"
        export = list(handles[uuid])
        export[6] = self.device.index  # As vLLM's: the trainer's number may be another.
        buffer = self._packed_importer.rebuild(export)
        with disable_mtp_completeness_check():
            self.model.load_weights(_tensors(buffer, update_info))
        keep_pending(self.model, buffer)


class IpcAdapters(ReceivesAdapters, IpcEngine):
    """Receives adapters instead of weights, and keeps copies of them."""

    def finish_weight_update(self) -> None:
        """Release the trainer's buffer."""
        self._packed_importer.close()


def _tensors(buffer: Tensor, info: IpcUpdateInfo) -> list[tuple[str, Tensor]]:
    """The bucket's tensors as views of the buffer."""
    found = []
    for name, dtype_name, shape, offset in zip(
        info.names, info.dtype_names, info.shapes, info.offsets_bytes, strict=True
    ):
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        found.append((name, buffer[offset : offset + num_bytes].view(dtype).view(shape)))
    return found
