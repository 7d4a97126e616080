"""The distributed optimizer's tensors in the shape of the parameters, gathered in bounded memory.

The format is Megatron's ``fully_reshardable``: one tensor of each kind for each parameter, which
any layout can slice. Megatron's own way to it gathers a whole DDP bucket at once on the GPU, which
without overlap of gradients is the whole stage (``bucket_size`` is ignored then), and keeps 12
bytes a parameter of the stage in every rank's host memory, when saving and when loading. Here the
ranks that hold the same weights gather at most ``GATHER_BUFFER_BYTES`` at a time, and each keeps
the parameters that it will write. To load, each takes the parameters of which it holds a part.
``rlmath.checkpoint.memory`` has the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint import memory

# As Megatron names them. Adam's step is with the parameter groups.
KINDS = ("param", "exp_avg", "exp_avg_sq")


def keep_to_bounded_memory(part: Any) -> None:
    """Have a ``DistributedOptimizer`` describe its tensors by this module. Idempotent."""

    def describe(model_state: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        return parameter_state(part, model_state, is_loading)

    part.sharded_param_state_fully_reshardable = describe


@dataclass
class _Parameter:
    index: int  # Number among all of the optimizer's, as Megatron counts when it loads.
    described: Any  # Its place in the whole model.
    start: int  # First element in the bucket.
    # Location of this rank's part: main parameter and Adam's moments, by kind; empty when it has
    # none.
    pieces: dict[str, Tensor]
    local_start: int  # Start of that part in the rank's share of the bucket.
    within: int  # Start of that part in the parameter.

    @property
    def shape(self) -> torch.Size:
        return self.described.data.shape

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_main(self) -> bool:
        """No other tensor or pipeline rank saves the same."""
        return not any(self.described.replica_id[:2])


def parameter_state(part: Any, model_state: Any, loading: bool) -> dict[int, dict[str, Any]]:
    """Tensors of the optimizer that this rank saves, or loads, by parameter and kind.

    Args:
        model_state: The model's sharded state, whose tensors are the parameters themselves.
        loading: Empty tensors to load into, without communication; else a collective of
            the part's data-parallel group.
    """
    group = part.data_parallel_group
    result: dict[int, dict[str, Any]] = {}
    for bucket, parameters in _buckets(part, model_state):
        if loading:
            local = [one for one in parameters if one.pieces]
            values = {one.index: {k: torch.zeros(one.numel) for k in KINDS} for one in local}
            for one in local:
                # Exactly one rank has the beginning.
                result[one.index] = _describe(one, values[one.index], int(one.within != 0))
        elif group.size() == 1:
            for one in filter(lambda one: one.is_main, parameters):
                flat = {kind: piece.detach() for kind, piece in one.pieces.items()}
                result[one.index] = _describe(one, flat, 0)
        else:
            own = _own_parameters(parameters, group)
            values = _gather(bucket, parameters, own, group)
            result |= {one.index: _describe(one, values[one.index], 0) for one in own}
    return result


def _buckets(part: Any, model_state: Any) -> Iterator[tuple[Any, list[_Parameter]]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    described = {
        one.data: one
        for one in nested_values(model_state)
        if isinstance(one, ShardedTensor | ShardedTensorFactory)
    }
    index = -1
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        (by_bucket,) = ranges.values()
        found: list[list[_Parameter]] = [[] for _ in by_bucket]
        for parameter, (start, _, number) in buffer.param_index_map.items():
            index += 1
            place = by_bucket[number]["param_map"].get(parameter)
            pieces: dict[str, Tensor] = {}
            if place is not None:
                kept = part._get_main_param_and_optimizer_states(parameter)
                pieces = {kind: kept[kind] for kind in KINDS}
            one = _Parameter(
                index,
                described[parameter],
                start - buffer.buckets[number].offset,
                pieces,
                place["gbuf_local"].start if place else 0,
                place["param"].start if place else 0,
            )
            found[number].append(one)
        yield from zip(buffer.buckets, found, strict=True)


def _own_parameters(parameters: list[_Parameter], group: Any) -> list[_Parameter]:
    """Parameters that this rank saves: the largest first, each to the rank that has least."""
    load = [0] * group.size()
    own = []
    for one in sorted(parameters, key=lambda one: (-one.numel, one.index)):
        if not one.is_main:
            continue
        rank = min(range(len(load)), key=load.__getitem__)
        load[rank] += one.numel
        if rank == group.rank():
            own.append(one)
    return own


def _gather(
    bucket: Any, parameters: list[_Parameter], own: list[_Parameter], group: Any
) -> dict[int, dict[str, Tensor]]:
    """Flat float32 tensors in host memory of the parameters that this rank saves."""
    ranks = group.size()
    share = bucket.grad_data.numel() // ranks
    step = max(1, min(share, memory.GATHER_BUFFER_BYTES // (4 * ranks)))
    options: Any = {"dtype": torch.float32, "device": bucket.grad_data.device}
    mine, everyone = torch.zeros(step, **options), torch.empty(step * ranks, **options)
    values = {one.index: {kind: torch.empty(one.numel) for kind in KINDS} for one in own}
    for kind in KINDS:
        for begin in range(0, share, step):
            for one in (one for one in parameters if one.pieces):
                piece = one.pieces[kind].detach()
                _copy_overlap(piece, one.local_start, mine, begin)
            dist.all_gather_into_tensor(everyone, mine, group=group)
            for rank in range(ranks):
                part = everyone[rank * step : (rank + 1) * step]
                # The last step is shorter; the elements beyond it belong to the next rank.
                part = part[: share - begin]
                for one in own:
                    _copy_overlap(part, rank * share + begin, values[one.index][kind], one.start)
    return values


def _copy_overlap(source: Tensor, source_start: int, target: Tensor, target_start: int) -> None:
    """Copy where two flat tensors with these places cover the same elements."""
    begin = max(source_start, target_start)
    end = min(source_start + source.numel(), target_start + target.numel())
    if begin < end:
        target[begin - target_start : end - target_start].copy_(
            source[begin - source_start : end - source_start]
        )


def _describe(one: _Parameter, values: dict[str, Tensor], replica: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    result = {}
    for kind, flat in values.items():
        changes: dict[str, Any] = {
            "key": f"optimizer.state.{kind}.{one.described.key}",
            "data": flat.view(one.shape),
            "replica_id": (*one.described.replica_id[:2], replica),
        }
        if not isinstance(one.described, ShardedTensorFactory):
            changes["dtype"] = flat.dtype
        result[kind] = dataclasses.replace(one.described, **changes)
    return result
