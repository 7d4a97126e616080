"""How ranks share a model and its data: the one description of a parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """Sizes of the process groups of a model. Ranks = tensor x pipeline x context x data.

    Attributes:
        tensor_parallel: Ranks that share each layer's matrices.
        pipeline_parallel: Stages, which share the layers.
        data_parallel: Ranks that share the sequences of a minibatch.
        context_parallel: Ranks that share the tokens of each sequence.
        expert_parallel: Ranks of a stage that share the experts of a MoE, each of which is whole
            on its rank; a divisor of ``tensor_parallel * data_parallel``. With 1 each copy of the
            model has all experts, sliced over its tensor-parallel ranks as other matrices are.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = field(default=1, kw_only=True)
    expert_parallel: int = field(default=1, kw_only=True)

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tensor_parallel if self.expert_parallel == 1 else 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights, experts apart."""
        return self.context_parallel * self.data_parallel

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same weights of the same experts."""
        if self.expert_parallel == 1:
            return self.copies
        return self.tensor_parallel * self.copies // self.expert_parallel

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.copies

    def __str__(self) -> str:
        """``TP 2 x PP 1 x CP 2 x DP 4, EP 8``, without context and expert ranks where it is 1."""
        context = f" x CP {self.context_parallel}" if self.context_parallel > 1 else ""
        experts = f", EP {self.expert_parallel}" if self.expert_parallel > 1 else ""
        return (
            f"TP {self.tensor_parallel} x PP {self.pipeline_parallel}{context} x "
            f"DP {self.data_parallel}{experts}"
        )
