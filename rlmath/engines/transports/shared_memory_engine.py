"""Engine's side of the ``shared_memory`` transport: runs in each vLLM worker."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlmath.engines.transports.adapter_engine import ReceivesAdapters
from rlmath.engines.transports.cpu_load import CpuLoader
from rlmath.engines.transports.engine_parts import PRODUCTS, UNSENT
from rlmath.engines.transports.segments import map_copy_on_write, map_writable, open_segment
from rlmath.errors import WeightsError
from rlmath.weights.buckets import BucketTensor, TensorMeta, view_in_buffer


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Names of the segments that the trainer writes."""

    segments: list[str]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the number of its segment, and the layout of its tensors."""

    segment: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets_bytes: list[int]


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads buckets from shared memory: directly, if every parameter's location is known.

    An MoE uses vLLM's layerwise reload, because its packed experts cannot be loaded in place: each
    layer temporarily gets its original parameters, which are loaded, packed again, and copied to
    where the engine reads.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._descriptors: list[int] = []
        self._expected: set[str] = set()
        self._loaded: set[str] = set()
        self._straight: CpuLoader | None = None
        # Segments mapped for direct loading: mapping one for each bucket would take a tenth of the
        # time of the copy.
        self._mapped: dict[int, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Open the segments; their names are not needed afterwards."""
        self.shutdown()
        self._descriptors = [open_segment(name) for name in init_info.segments]

    def start_weight_update(self) -> None:
        """Prepare to load every parameter."""
        quantizes = self.model_config.quantization is not None
        straight = self._straight or (None if quantizes else CpuLoader(self.model))
        if straight is not None and straight.takes_all:
            self._straight = straight
            straight.begin()
            return
        self._loaded = set()
        _pack_experts_again(self.model)
        if not quantizes:
            self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        if quantizes:
            # From before the first quantization, which added scales.
            self._expected = {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one bucket. Afterwards the engine does not reference its segment. Raises
        RuntimeError: something still references it; the next bucket would overwrite it."""
        segment = update_info.segment
        if self._straight is not None:
            self._straight.load(self._tensors(self._segment(segment), update_info))
            return
        memory = map_copy_on_write(self._descriptors[segment])
        still_mapped = weakref.ref(memory)
        self._load(memory, update_info)
        del memory
        if still_mapped() is not None:
            gc.collect()
            if still_mapped() is not None:
                raise RuntimeError(
                    "vLLM kept a tensor of the shared segment after loading "
                    f"{update_info.names[0]} to {update_info.names[-1]}"
                )

    def finish_weight_update(self) -> None:
        """Activate the new weights. Raises WeightsError: the trainer did not send all
        parameters."""
        if self._straight is not None:
            missing = sorted(self._straight.missing)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            unsent = self._expected - self._loaded
            missing = sorted(name for name in unsent if not name.endswith(PRODUCTS))
        if missing:
            raise WeightsError(
                f"{UNSENT} {len(missing)} tensors as they were, which the actor did not send: "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )

    def shutdown(self) -> None:
        self._mapped.clear()
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def _segment(self, number: int) -> torch.Tensor:
        """A segment, mapped once."""
        if number not in self._mapped:
            self._mapped[number] = map_writable(self._descriptors[number])
        return self._mapped[number]

    def _load(self, memory: Any, update_info: SharedMemoryUpdateInfo) -> None:
        base = torch.frombuffer(memory, dtype=torch.uint8)
        self._loaded |= self.model.load_weights(self._tensors(base, update_info))
        self._keep_pending(base)

    def _tensors(
        self, base: torch.Tensor, update_info: SharedMemoryUpdateInfo
    ) -> list[tuple[str, torch.Tensor]]:
        """The bucket's tensors as views of its segment."""
        return [
            (name, _view(base, dtype_name, shape, offset))
            for name, dtype_name, shape, offset in zip(
                update_info.names,
                update_info.dtype_names,
                update_info.shapes,
                update_info.offsets_bytes,
                strict=True,
            )
        ]

    def _keep_pending(self, base: torch.Tensor) -> None:
        """Copy tensors that vLLM holds back for a layer whose others are in a later bucket.

        The reload references a layer's tensors until it has all of them (such as query without key
        and value), but the segment is overwritten meanwhile.
        """
        begin = base.data_ptr()
        end = begin + base.numel()
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and begin <= value.data_ptr() < end:
                        bound.arguments[key] = value.clone()


class SharedMemoryAdapters(ReceivesAdapters, SharedMemoryEngine):
    """Receives adapters instead of weights, and keeps copies of them."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Copy one bucket."""
        segment = self._segment(update_info.segment)
        self.model.load_weights(self._tensors(segment, update_info))


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Let vLLM pack the experts' matrices again after loading, as at its start.

    If a layer already has its kernel, vLLM 0.32 treats the loaded matrices as packed, and a CPU
    engine would compute with rows in the wrong places.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _view(base: torch.Tensor, dtype_name: str, shape: list[int], offset_bytes: int) -> torch.Tensor:
    # The name is not used here.
    meta = TensorMeta("", tuple(shape), getattr(torch, dtype_name))
    return view_in_buffer(base, BucketTensor(meta, offset_bytes))
