"""Messages between pipeline stages, without an exchange of their shapes.

Micro-batches vary in size. Megatron sends the shape of each before it, and waits for the device to
read it. But every stage has the list of micro-batches, and Megatron's schedule is a table, so each
stage knows what it will be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn


class StageMessages(P2PCommunicator):
    """Megatron's messages of one pass.

    Args:
        micro_batches: Number of micro-batches of the pass.
        tokens_of: Number of tokens of a micro-batch, those of all tensor ranks. Asked whenever it
            is about to be received.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], micro_batches: int, tokens_of: Callable[[int], int]
    ) -> None:
        self.groups = ProcessGroupCollection.use_mpu_process_groups(
            ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"]
        )
        config: Any = get_model_config(chunks[0])
        super().__init__(self.groups.pp, config)
        # Backward passes run through the chunks in the opposite order, with the same micro-batches.
        group_size = config.microbatch_group_size_per_vp_stage
        table = get_schedule_table(micro_batches, len(chunks), group_size)
        all_of_them = [number for number, _ in table]
        # The first stage gets from the last one what another of its chunks continues.
        continued = [number for number, chunk in table if chunk < len(chunks) - 1]
        rank, ranks = self.groups.pp.rank(), self.groups.pp.size()
        self._from_prev = iter(continued if rank == 0 else all_of_them)
        self._from_next = iter(continued if rank == ranks - 1 else all_of_them)
        self._split = self.groups.tp.size() if config.sequence_parallel else 1
        self._tokens_of = tokens_of

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Shapes of messages from the previous stage and from the next one."""
        return (
            self._shape(self._from_prev) if recv_prev else None,
            self._shape(self._from_next) if recv_next else None,
        )

    def _shape(self, numbers: Iterator[int]) -> tuple[int, int, int]:
        return self._tokens_of(next(numbers)) // self._split, 1, self.config.hidden_size
