"""What a loss reads of each response token of a micro-batch, on the device before it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlmath.actor.packing import Pack

Fields = dict[str, Tensor]


class LossFields:
    """The fields of every pack of a minibatch, copied to the device before the schedule starts.

    A copy from pageable memory makes the host wait for the GPU: within the schedule it would leave
    the GPU idle until the host has queued more.

    Args:
        packs: Of this rank.
        device: Where the model runs.
        values: ``[R]`` each, on the CPU; those that are ``None`` are left out.
    """

    def __init__(
        self, packs: Sequence[Pack], device: torch.device, values: Mapping[str, Tensor | None]
    ) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        self._fields = {
            id(one): {name: value[one.response_rows].to(device) for name, value in present.items()}
            for one in packs
        }

    def of(self, pack: Pack) -> Fields:
        """``[r]`` each, of the pack's response tokens."""
        return self._fields[id(pack)]
