"""The loss's inputs for each response token of a micro-batch, copied to the device in advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlmath.actor.packing import PackedMicroBatch

Fields = dict[str, Tensor]


class LossFields:
    """Fields of all micro-batches of a minibatch, copied to the device before the schedule.

    A copy from pageable memory makes the host wait for the GPU: within the schedule it would leave
    the GPU idle until the host has queued more work.

    Args:
        micro_batches: Micro-batches of this rank.
        device: Device of the model.
        values: ``[R]`` each, on the CPU; ``None`` values are left out.
    """

    def __init__(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        device: torch.device,
        values: Mapping[str, Tensor | None],
    ) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        self._fields = {
            id(one): {name: value[one.response_rows].to(device) for name, value in present.items()}
            for one in micro_batches
        }
        # For a skipped micro-batch, which has one response token with any value.
        self._any = {name: value[:1].to(device) for name, value in present.items()}

    def of(self, micro_batch: PackedMicroBatch) -> Fields:
        """``[r]`` each, fields of the micro-batch's response tokens."""
        return self._fields.get(id(micro_batch), self._any)
