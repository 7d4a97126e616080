"""The other ranks of a layout: torch's fake process group, and what they would answer.

For its own process, like ``meta_gpu.py``. Collectives of tensors give this rank's own values
back; ranks exchange objects when they agree on who holds which weights and who writes what, and
there the others' answers follow from the weight tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlmath.model.families import When
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, padded_vocab_size
from rlmath.weights.pieces import local_tensor, walk
from rlmath.weights.runs import Run

# Answer of a rank to an object that this rank sends to all: (object, global rank).
Answer = Callable[[Any, int], Any]


@dataclass(frozen=True)
class Place:
    """A global rank's place. Megatron numbers tensor ranks first, then context, data, stages."""

    tp: int
    pp: int
    ep: int
    expert_tp: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        per_stage = layout.world_size // layout.pipeline_parallel
        return cls(
            tp=rank % layout.tensor_parallel,
            pp=rank // per_stage,
            ep=rank % per_stage // layout.expert_tensor_parallel % layout.expert_parallel,
            expert_tp=rank % layout.expert_tensor_parallel,
        )


def runs_of(
    spec: ModelSpec, layout: Layout, place: Place, dtype: torch.dtype
) -> dict[Run, torch.dtype]:
    """The runs that a rank reports to the others; see ``BucketGatherer``."""
    layers = layout.stage_layers(spec.layers, place.pp)
    per_rank = spec.experts // layout.expert_parallel
    last = place.pp == layout.pipeline_parallel - 1
    found: dict[Run, torch.dtype] = {}
    for entry, layer, expert in walk(spec):
        if entry.when is When.tied:
            continue  # A copy of the first stage's embedding, which nobody sends.
        if layer is None:
            first = entry.megatron[0].startswith("embedding")
            if not (place.pp == 0 if first else last):
                continue
        elif layer not in layers:
            continue
        if expert is not None and expert // per_rank != place.ep:
            continue
        tensor = local_tensor(
            entry,
            spec,
            place.tp if expert is None else place.expert_tp,
            layout.tensor_parallel if expert is None else layout.expert_tensor_parallel,
            padded_vocab_size(spec.vocab, layout.tensor_parallel),
            layer,
            expert,
        )
        for piece in tensor.pieces:
            size = list(tensor.shape)
            size[piece.dim] = piece.length
            found[Run(piece.hf_name, piece.dim, piece.hf_start, tuple(size))] = dtype
    return found


class Peers:
    """Answers of the other ranks to ``all_gather_object``: their runs, else this rank's object."""

    def __init__(self, spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> None:
        self._spec, self._layout, self._dtype = spec, layout, dtype
        self._runs: dict[Place, dict[Run, torch.dtype]] = {}

    def __call__(self, mine: Any, rank: int) -> Any:
        if not (isinstance(mine, dict) and mine and isinstance(next(iter(mine)), Run)):
            return mine
        place = Place.of(self._layout, rank)
        if place not in self._runs:
            self._runs[place] = runs_of(self._spec, self._layout, place, self._dtype)
        return self._runs[place]


def install() -> None:
    """Make every process group a fake one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group: Any = dist.new_group

    def fake_group(ranks: Any = None, *_: Any, **kwargs: Any) -> Any:
        kwargs = {key: kwargs[key] for key in ("group_desc",) if key in kwargs}
        return new_group(ranks, backend="fake", **kwargs)

    init: Any = dist.init_process_group

    def fake_init(backend: Any = None, *_: Any, rank: int, world_size: int, **__: Any) -> None:
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    replaced: Any = dist
    replaced.new_group, replaced.init_process_group = fake_group, fake_init
    replaced.TCPStore = lambda *_, **__: FakeStore()
    replaced.barrier = lambda *_, **__: None
    import megatron.core.distributed.param_and_grad_buffer as buffers

    # Coalesced collectives have no kernel for meta tensors; one by one they have.
    buffers._coalescing_manager = _one_by_one


@contextlib.contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    yield mock.Mock()


def answer_with(answer: Answer) -> None:
    """Let the other ranks answer ``all_gather_object`` so."""

    def all_gather_object(out: list[Any], mine: Any, group: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        own = dist.get_rank()
        out[:] = [mine if rank == own else answer(mine, rank) for rank in ranks]

    replaced: Any = dist
    replaced.all_gather_object = all_gather_object
