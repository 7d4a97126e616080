"""``rlmath plan weights``: the plan of an update as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from rlmath.commands.plan.gpus import GPUS, Efficiency, gpu_named
from rlmath.commands.plan.models import read_named_model
from rlmath.commands.plan.report import not_trained
from rlmath.commands.plan.weight_sync import as_text, sync_time
from rlmath.config.command_line import Given, positive
from rlmath.config.schema import Placement
from rlmath.config.weights import bucket_mib
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.utils.lazy_torch import torch
from rlmath.weights.plan import (
    Operation,
    PlannedBucket,
    SourceRank,
    WeightsPlan,
    plan_weights,
)

MIB = 2**20


# Settings that a plan of the weight sync depends on.
SETTINGS = (
    "plugins",
    "model.path",
    "model.dtype",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.pipeline_layers",
    "actor.virtual_stages",
    "actor.expert_parallel",
    "cluster.gpus_per_node",
    "cluster.placement",
    "rollout.tensor_parallel",
    "weights.bucket_size_mib",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine-expert-parallel", action="store_true", help="engine: whole experts per rank")
    add("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (default: h100)")
    add("--network-gb-per-s", type=positive, help="of a GPU to other nodes, one way (default: 50)")
    add("--json", action="store_true", help="every operation, as JSON")


def run(arguments: argparse.Namespace, given: Given) -> int:
    """Print the plan that the options ask for. Raises UserError: there is no such model, or an
    option is for an MoE; WeightsError: it cannot be laid out so."""
    config = given.config
    if given.get("model.path") is None:
        raise UserError("rlmath plan weights: give model.path, a name, a folder or its config.json")
    _, spec = read_named_model(config.model.path)
    if arguments.engine_expert_parallel and not spec.experts:
        raise UserError(f"--engine-expert-parallel: {config.model.path} has no experts to share")
    actor, engine_ranks = config.actor, config.rollout.tensor_parallel
    dtype = getattr(torch, config.model.dtype.value)
    plan = plan_weights(
        spec,
        Layout(
            actor.tensor_parallel,
            actor.pipeline_parallel,
            expert_parallel=actor.expert_parallel,
            pipeline_layers=tuple(actor.pipeline_layers or ()),
            virtual_stages=actor.virtual_stages,
        ),
        Layout(
            engine_ranks,
            expert_parallel=engine_ranks if arguments.engine_expert_parallel else 1,
        ),
        bucket_mib(config.weights.bucket_size_mib, spec.num_parameters * dtype.itemsize),
        dtype,
    )
    gpu, network = gpu_named(arguments.gpu), arguments.network_gb_per_s
    efficiency = Efficiency() if network is None else Efficiency(network_gb_per_s=network)
    time = sync_time(
        spec,
        plan.actor,
        weights_bytes=plan.num_bytes,
        buckets=len(plan.buckets),
        engine_tp=engine_ranks,
        colocated=config.cluster.placement is Placement.colocated,
        gpu=gpu,
        efficiency=efficiency,
        gpus_per_node=config.cluster.gpus_per_node,
    )
    warnings = not_trained(spec, gpu)
    if arguments.json:
        seconds = {time.transport: vars(time) | {"seconds": time.seconds}}
        # On one line: json indents in Python, which takes ten times as long for a large MoE.
        print(json.dumps(as_json(plan) | {"times": seconds, "warnings": warnings}))
    else:
        on_paper = as_text(time, gpu, efficiency, config.cluster.gpus_per_node)
        print(as_table(plan), on_paper, sep="\n\n")
        for text in warnings:
            print(f"warning: {text}")
    return 0


def as_json(plan: WeightsPlan) -> dict[str, Any]:
    return {
        "architecture": plan.spec.architecture,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "num_bytes": plan.num_bytes,
        "padded_vocab": plan.padded_vocab,
        "actor": vars(plan.actor),
        "engine": vars(plan.engine),
        "stages": plan.stages,
        "buckets": [_bucket_json(bucket) for bucket in plan.buckets],
    }


def _bucket_json(planned: PlannedBucket) -> dict[str, Any]:
    return {
        "num_bytes": planned.bucket.num_bytes,
        "tensors": [
            {"name": t.meta.name, "shape": t.meta.shape, "offset_bytes": t.offset_bytes}
            for t in planned.bucket.tensors
        ],
        "gathers": [_operation_json(op) for op in planned.gathers],
        "loads": [_operation_json(op) for op in planned.loads],
    }


def _operation_json(operation: Operation) -> dict[str, Any]:
    rank = operation.rank
    return {**vars(operation), "rank": vars(rank) if isinstance(rank, SourceRank) else rank}


def as_table(plan: WeightsPlan) -> str:
    """One line per bucket, then what each rank gives and keeps, in MiB."""
    actor, spec = plan.actor, plan.spec
    experts = f" x EP {actor.expert_parallel}" if spec.experts else ""
    lines = [
        f"{spec.architecture}, {spec.layers} layers, {plan.num_bytes / MIB:.1f} MiB in "
        f"{str(plan.dtype).removeprefix('torch.')}, {'tied' if spec.tied else 'untied'} embedding",
        f"actor TP {actor.tensor_parallel} x PP {actor.pipeline_parallel}{experts} -> engine TP "
        f"{plan.engine.tensor_parallel}",
        f"vocabulary {spec.vocab}"
        + (f", padded to {plan.padded_vocab}" if plan.padded_vocab != spec.vocab else ""),
        *(f"stage {pp}: layers {_runs(chunks)}" for pp, chunks in enumerate(plan.stages)),
        "",
        f"{'bucket':>6}  {'MiB':>9}  {'tensors':>7}  {'gathers':>7}  {'loads':>7}  first .. last",
    ]
    for number, planned in enumerate(plan.buckets):
        names = [t.meta.name for t in planned.bucket.tensors]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        lines.append(
            f"{number:>6}  {planned.bucket.num_bytes / MIB:>9.1f}  {len(names):>7}  "
            f"{len(planned.gathers):>7}  {len(planned.loads):>7}  {span}"
        )
    given: Counter[SourceRank | int] = Counter()
    kept: Counter[SourceRank | int] = Counter()
    for planned in plan.buckets:
        for operation in planned.gathers:
            given[operation.rank] += operation.num_bytes
        for operation in planned.loads:
            kept[operation.rank] += operation.num_bytes
    lines += ["", "trainer rank gives:"]
    lines += [f"  {_rank(rank):<14} {given[rank] / MIB:>9.1f} MiB" for rank in given]
    lines += ["engine rank keeps:"]
    lines += [f"  {_rank(rank):<14} {kept[rank] / MIB:>9.1f} MiB" for rank in kept]
    lines += [
        f"A receiving rank holds two buckets: {2 * plan.largest_bucket_bytes / MIB:.1f} MiB at most"
    ]
    return "\n".join(lines)


def _runs(chunks: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(f"{c[0]}-{c[-1]}" if c else "none" for c in chunks)


def _rank(rank: SourceRank | int) -> str:
    if isinstance(rank, int):
        return f"tp {rank}"
    expert = f" ep {rank.ep}" if rank.ep else ""
    return f"pp {rank.pp} tp {rank.tp}{expert}"
