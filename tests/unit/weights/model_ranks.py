"""Gatherers of one rank among several, without the others: what they offer is computed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlmath.model.rank_layout import ParallelRank
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.pieces import local_tensor, walk


def modules_like(spec, implementation, parallel, device="cpu", dtype=torch.float32):
    """A module tree with Megatron's parameter names: 0 local, 1 Transformer Engine."""
    root = nn.Module()
    layers = [nn.Module() for _ in range(spec.layers)]
    for number, layer in enumerate(layers):
        layer.layer_number = number + 1
    root.decoder = nn.Module()
    root.decoder.layers = nn.ModuleList(layers)
    experts_here = spec.experts // parallel.ep_size
    for entry, layer_number, expert in walk(spec):
        if entry.when.name == "tied" or (expert is not None and expert >= experts_here):
            continue
        name = entry.megatron[min(implementation, len(entry.megatron) - 1)]
        tp_rank, tp_size = parallel.tp_rank, parallel.tp_size
        if entry.per_expert:
            tp_rank, tp_size = parallel.expert_tp_rank, parallel.expert_tp_size
        place = local_tensor(entry, spec, tp_rank, tp_size, spec.vocab, layer_number, expert)
        path = name.format(layer=layer_number, expert=expert).split(".")
        module = root
        for part in path[:-1]:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        values = torch.full(place.shape, -77.0, device=device, dtype=dtype)
        module.register_parameter(path[-1], nn.Parameter(values))
    return root


def gatherer_of(patch, spec, ranks, bucket_size_mib, device="cpu", dtype=torch.bfloat16):
    """Rank 0 of ``ranks`` tensor-parallel ranks (an expert is whole on one), and its model."""
    group = object() if ranks > 1 else None

    def parallel(rank):
        expert_ranks = ranks if spec.experts else 1
        return ParallelRank(
            tp_rank=rank,
            tp_size=ranks,
            ep_rank=rank if spec.experts else 0,
            ep_size=expert_ranks,
            group=group,
        )

    if group is None:
        model = modules_like(spec, 0, parallel(0), device, dtype)
        return BucketGatherer([model], spec, parallel(0), bucket_size_mib), model
    here = [0]
    offered = []
    patch.setattr(dist, "get_process_group_ranks", lambda _: list(range(ranks)))
    patch.setattr(dist, "get_rank", lambda *_: here[0])

    def note(out, mine, group=None):
        offered[-1].append(mine)
        out[:] = [mine if rank == here[0] else type(mine)() for rank in range(ranks)]

    patch.setattr(dist, "all_gather_object", note)
    for rank in range(1, ranks):
        here[0] = rank
        offered.append([])
        model = modules_like(spec, 0, parallel(rank), device, dtype)
        # A part of the model alone is refused, after it has been offered.
        with pytest.raises(Exception, match="Megatron"):
            BucketGatherer([model], spec, parallel(rank), bucket_size_mib)
    here[0], calls = 0, iter(range(2))

    def others(out, mine, group=None):
        number = next(calls)
        out[:] = [mine, *(of_rank[number] for of_rank in offered)]

    patch.setattr(dist, "all_gather_object", others)
    model = modules_like(spec, 0, parallel(0), device, dtype)
    return BucketGatherer([model], spec, parallel(0), bucket_size_mib), model
