"""Fingerprints by tensor of gradients, and of a model that no engine gets.

Named and positioned like the files' tensors, with each element counted once, so equal numbers have
equal fingerprints on any number of ranks: a part that several ranks have is counted on the first of
them, and each rank of a distributed optimizer counts the elements that it reduces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.model.lora import Lora
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.adapters import local_adapters
from rlmath.weights.fingerprint import fingerprint_on_device
from rlmath.weights.parameters import local_parameters
from rlmath.weights.runs import Run


@dataclass(frozen=True)
class _Part:
    """The part of this rank's parameter that belongs to one tensor of the files."""

    run: Run
    parameter: Tensor
    dim: int
    start: int
    first: int  # The first of the ranks that reduce this gradient together.

    def fingerprint(self, row: int, block: Tensor) -> Tensor | None:
        """Contribution of rows of a tensor shaped like the parameter to the fingerprint. Returns an
        int64 scalar on the device; ``None`` if no row is in the part. ``row``: index of the first
        row. ``block``: the complete rows."""
        if self.dim == 1:
            columns = block.narrow(1, self.start, self.run.length)
            return fingerprint_on_device(columns, row, self.run.start)
        first = max(row, self.start)
        count = min(row + len(block), self.start + self.run.length) - first
        if count <= 0:
            return None
        rows = block.narrow(0, first - row, count)
        return fingerprint_on_device(rows, self.run.start + first - self.start)


class TensorPrints:
    """Fingerprints of one model on all ranks. Collective over all of them, including construction.

    Args:
        chunks: Model chunks of this rank's stage.
        optimizer: Megatron's optimizer of the chunks.
        adapters: The trained adapters; ``None``: the model is trained.
        head: Parameters that are in no table, by name; no rank has only a part of one.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        spec: ModelSpec,
        parallel: ParallelRank,
        optimizer: Any,
        adapters: Lora | None = None,
        head: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._rank = dist.get_rank()
        skipped = frozenset(map(id, (head or {}).values()))
        own = list(_parts(chunks, spec, parallel, adapters, skipped))
        for name, parameter in (head or {}).items():
            run = Run(name, 0, 0, tuple(parameter.shape))
            own.append(_Part(run, parameter, 0, 0, _first_of(parameter)))
        offered: list[dict[Run, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(offered, {part.run: part.first for part in own})
        counted: dict[Run, int] = {}
        for of_rank in offered:
            for run, first in of_rank.items():
                counted.setdefault(run, first)
        self.names = sorted({run.name for run in counted})
        self._own = [part for part in own if counted[part.run] == part.first]
        self._places = {name: place for place, name in enumerate(self.names)}
        device = next(iter(chunks[0].parameters())).device
        self._sums = torch.zeros(len(self.names), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add_gradient(self, minibatch: int) -> None:
        """Add the reduced but not yet applied gradient of a minibatch. ``minibatch``: index from 0;
        the same gradients in another order have another fingerprint."""
        for part in self._own:
            for row, block in self._reduced_rows(part):
                self._count(part, row, block, 2 * minibatch + 1)

    @torch.no_grad()
    def add_weights(self) -> None:
        """Add the parameters themselves."""
        for part in self._own:
            if self._rank == part.first:
                self._count(part, 0, part.parameter.detach())

    def take(self) -> dict[str, int]:
        """The fingerprints accumulated since the last call, over all ranks."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        return dict(zip(self.names, sums.tolist(), strict=True))

    def _count(self, part: _Part, row: int, block: Tensor, factor: int = 1) -> None:
        found = part.fingerprint(row, block)
        if found is not None:
            # Wraps like a fingerprint. The host does not wait for the GPU before `take`.
            self._sums[self._places[part.run.name]] += found.to(self._sums.device) * factor

    def _reduced_rows(self, part: _Part) -> Iterator[tuple[int, Tensor]]:
        """The rows of a parameter's gradient that this rank counts, with their first index."""
        gradient: Tensor | None = getattr(part.parameter, "main_grad", None)
        if gradient is None:
            return
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "model_param_gbuf_map"):
                if self._rank == part.first:
                    yield 0, gradient
                return
            if part.parameter in optimizer.model_param_gbuf_map:
                own = optimizer._get_model_param_range_map(part.parameter)["param"]
                yield from rows_of(gradient, own.start, own.end)
                return


def rows_of(values: Tensor, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """Consecutive elements of a tensor as rows, with 0 for other elements; complete rows are not
    copied. ``start``: index of the first element, in memory order. ``end``: index after the last
    one."""
    columns = math.prod(values.shape[1:])
    flat = values.reshape(-1)
    while start < end:
        row, within = divmod(start, columns)
        whole = (end - start) // columns
        if within == 0 and whole:
            yield row, values[row : row + whole]
            start += whole * columns
            continue
        stop = min(end, (row + 1) * columns)
        part = values.new_zeros((1, *values.shape[1:]))
        part.view(-1)[within : within + stop - start] = flat[start:stop]
        yield row, part
        start = stop


def _parts(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    parallel: ParallelRank,
    adapters: Lora | None,
    skipped: frozenset[int],
) -> Iterator[_Part]:
    if adapters is None:
        found = local_parameters(chunks, spec, parallel, skipped)
    else:
        found = local_adapters(chunks, spec, parallel, adapters)
    for one in found:
        if one.is_copy:
            continue  # Its gradient is added to that of the original.
        for piece in one.layout.pieces:
            size = list(one.tensor.shape)
            size[piece.dim] = piece.length
            run = Run(piece.hf_name, piece.dim, piece.hf_start, tuple(size))
            yield _Part(run, one.tensor, piece.dim, piece.local_start, _first_of(one.tensor))


def _first_of(parameter: Tensor) -> int:
    """The first of the ranks that reduce a parameter's gradient together."""
    from megatron.core import parallel_state as state

    # Megatron's mark of experts, whose gradients are reduced by fewer ranks.
    if getattr(parameter, "allreduce", True):
        group = state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = state.get_expert_data_parallel_group()
    return min(dist.get_process_group_ranks(group))
