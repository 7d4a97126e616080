"""This process's position among the ranks that share one copy of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ParallelRank:
    """Ranks that share the model, and the position of this process.

    Attributes:
        tp_rank, tp_size: Tensor parallel.
        pp_rank: Pipeline parallel.
        ep_rank, ep_size: Expert parallel.
        expert_tp_rank, expert_tp_size: Tensor parallel within experts.
        group: Ranks that together have at least one whole model; ``None`` for a single process
            without ``torch.distributed``.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def from_megatron(cls) -> ParallelRank:
        """Read Megatron's parallel state, which must be initialized."""
        from megatron.core import parallel_state as state

        ep_size = state.get_expert_model_parallel_world_size()
        expert_tp_size = state.get_expert_tensor_parallel_world_size()
        tp_size = state.get_tensor_model_parallel_world_size()
        # Experts are spread over data-parallel ranks, and only all ranks together have them all.
        spread = ep_size > 1 or expert_tp_size != tp_size
        return cls(
            tp_rank=state.get_tensor_model_parallel_rank(),
            tp_size=tp_size,
            pp_rank=state.get_pipeline_model_parallel_rank(),
            ep_rank=state.get_expert_model_parallel_rank(),
            ep_size=ep_size,
            expert_tp_rank=state.get_expert_tensor_parallel_rank(),
            expert_tp_size=expert_tp_size,
            group=dist.group.WORLD if spread else state.get_model_parallel_group(),
        )

    @property
    def global_ranks(self) -> list[int]:
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def global_rank(self) -> int:
        return 0 if self.group is None else dist.get_rank()
