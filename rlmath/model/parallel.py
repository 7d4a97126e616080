"""The parallel layout: how ranks share a model and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmath.errors import UserError


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as equal as possible: ``(23, 24, 24, 23)`` of 94.

    Remaining layers go to the stages in between, then to the first: the last stage has the output
    layer and its logits, the first the embedding.
    """
    each, left = divmod(layers, stages)
    longer = [*range(1, stages - 1), 0, stages - 1][:left]
    return tuple(each + (stage in longer) for stage in range(stages))


def stage_problem(sizes: Sequence[int], layers: int, stages: int) -> str | None:
    """Why stages of these sizes cannot share a model's layers; ``None`` if they can."""
    if stages > layers:
        return (
            f"actor.pipeline_parallel={stages}: the model has {layers} layers, and every stage "
            f"needs one; use at most {layers}"
        )
    if len(sizes) == stages and sum(sizes) == layers and min(sizes) > 0:
        return None
    works = ",".join(map(str, even_stages(layers, stages)))
    return (
        f"actor.pipeline_layers=[{','.join(map(str, sizes))}]: has {len(sizes)} stages with "
        f"{sum(sizes)} layers; actor.pipeline_parallel={stages} and the model's {layers} layers "
        f"need {stages} numbers of at least 1 that add up to {layers}; works: [{works}]"
    )


def chunk_problem(sizes: Sequence[int], virtual_stages: int) -> str | None:
    """Why stages of these sizes cannot be split into chunks; ``None`` if they can."""
    if all(size >= virtual_stages for size in sizes):
        return None
    return (
        f"actor.virtual_stages={virtual_stages}: the pipeline stages have "
        f"{'+'.join(map(str, sizes))} layers, and each needs one for each of its chunks; use "
        f"actor.virtual_stages={min(sizes)} or less, or fewer stages"
    )


@dataclass(frozen=True)
class Layout:
    """Sizes of a model's process groups. Ranks = tensor x pipeline x context x data."""

    tensor_parallel: int = 1  # Ranks that share each layer's matrices.
    pipeline_parallel: int = 1  # Pipeline stages, which share the layers.
    data_parallel: int = 1  # Ranks that share the sequences of a minibatch.
    # Ranks that share the tokens of each sequence.
    context_parallel: int = field(default=1, kw_only=True)
    # Ranks of a stage that share the experts of an MoE, each expert complete on its rank; a divisor
    # of tensor_parallel * data_parallel. With 1, each copy of the model has all experts, sharded
    # over its tensor-parallel ranks like other matrices.
    expert_parallel: int = field(default=1, kw_only=True)
    # Layers of each stage; empty: as in even_stages.
    pipeline_layers: tuple[int, ...] = field(default=(), kw_only=True)
    # Chunks of the model per stage. All have the same number of layers, or the first ones have one
    # more. The first chunk of every stage precedes the second of every stage, and so on.
    virtual_stages: int = field(default=1, kw_only=True)

    @property
    def expert_tensor_parallel(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tensor_parallel if self.expert_parallel == 1 else 1

    @property
    def copies(self) -> int:
        """Ranks with the same weights, except for experts."""
        return self.context_parallel * self.data_parallel

    @property
    def expert_copies(self) -> int:
        """Ranks with the same weights of the same experts."""
        if self.expert_parallel == 1:
            return self.copies
        return self.tensor_parallel * self.copies // self.expert_parallel

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.copies

    def stage_sizes(self, layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage of a model with ``layers`` layers. Raises UserError:
        ``pipeline_layers`` do not fit this model, or a stage or chunk would be empty."""
        sizes = self.pipeline_layers or even_stages(layers, self.pipeline_parallel)
        problem = stage_problem(sizes, layers, self.pipeline_parallel)
        problem = problem or chunk_problem(sizes, self.virtual_stages)
        if problem:
            raise UserError(problem)
        return sizes

    def stage_chunks(self, layers: int) -> tuple[tuple[range, ...], ...]:
        """Layers of each chunk of each pipeline stage, from 0. Raises UserError: as
        :meth:`stage_sizes`."""
        sizes, begin = self.stage_sizes(layers), 0
        found: list[list[range]] = [[] for _ in sizes]
        for chunk in range(self.virtual_stages):
            for stage, size in enumerate(sizes):
                each, left_over = divmod(size, self.virtual_stages)
                end = begin + each + (chunk < left_over)
                found[stage].append(range(begin, end))
                begin = end
        return tuple(map(tuple, found))

    def stage_layers(self, layers: int, stage: int) -> tuple[int, ...]:
        """Layers of a pipeline stage, from 0, of a model with ``layers`` layers."""
        return tuple(n for chunk in self.stage_chunks(layers)[stage] for n in chunk)

    def __str__(self) -> str:
        """``TP 2 x PP 2 (1+3) x CP 2 x DP 4, EP 8``; parts that are 1 or not given are omitted,
        except TP, PP and DP."""
        context = f" x CP {self.context_parallel}" if self.context_parallel > 1 else ""
        experts = f", EP {self.expert_parallel}" if self.expert_parallel > 1 else ""
        sizes = f" ({'+'.join(map(str, self.pipeline_layers))})" if self.pipeline_layers else ""
        if self.virtual_stages > 1:
            sizes += f" x VP {self.virtual_stages}"
        return (
            f"TP {self.tensor_parallel} x PP {self.pipeline_parallel}{sizes}{context} x "
            f"DP {self.data_parallel}{experts}"
        )
