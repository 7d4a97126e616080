"""``rlmath plan weights``: the buckets of a weight sync, and its time, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rlmath.checks.layout import divided_layout
from rlmath.commands.plan.engine_memory import engine_weights_bytes
from rlmath.commands.plan.gpus import GPUS, Efficiency, gpu_named
from rlmath.commands.plan.models import (
    expert_parameters_of_rank,
    parameters_of_rank,
    read_named_model,
)
from rlmath.commands.plan.report import not_trained
from rlmath.commands.plan.weight_sync import as_text, planned_buckets, sync_time
from rlmath.config.command_line import Given, positive
from rlmath.config.schema import Placement
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, padded_vocab_size
from rlmath.utils.lazy_torch import torch
from rlmath.weights.buckets import Bucket

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
    add("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (default: h100)")
    add("--network-gb-per-s", type=positive, help="of a GPU to other nodes, one way (default: 50)")
    add("--json", action="store_true", help="every tensor, as JSON")


def run(arguments: argparse.Namespace, given: Given) -> int:
    """Print the plan. Raises UserError: there is no such model, or it cannot be laid out so."""
    config = given.config
    if given.get("model.path") is None:
        raise UserError("rlmath plan weights: give model.path, a name, a folder or its config.json")
    _, spec = read_named_model(config.model.path)
    layout, engine_tp = divided_layout(config, spec), config.rollout.tensor_parallel
    dtype = getattr(torch, config.model.dtype.value)
    buckets = planned_buckets(spec, config, dtype)
    num_bytes = sum(one.num_bytes for one in buckets)
    gpu, network = gpu_named(arguments.gpu), arguments.network_gb_per_s
    efficiency = Efficiency() if network is None else Efficiency(network_gb_per_s=network)
    time = sync_time(
        spec,
        layout,
        weights_bytes=num_bytes,
        buckets=len(buckets),
        engine_tp=engine_tp,
        colocated=config.cluster.placement is Placement.colocated,
        gpu=gpu,
        efficiency=efficiency,
        gpus_per_node=config.cluster.gpus_per_node,
    )
    warnings = not_trained(spec, gpu)
    if arguments.json:
        plan = {
            "architecture": spec.architecture,
            "dtype": config.model.dtype.value,
            "num_bytes": num_bytes,
            "padded_vocab": padded_vocab_size(spec.vocab, layout.tensor_parallel),
            "actor": vars(layout),
            "stages": layout.stage_chunks(spec.layers),
            "buckets": [
                {
                    "num_bytes": one.num_bytes,
                    "tensors": [
                        {"name": t.meta.name, "shape": t.meta.shape, "offset_bytes": t.offset_bytes}
                        for t in one.tensors
                    ],
                }
                for one in buckets
            ],
            "times": {time.transport: vars(time) | {"seconds": time.seconds}},
            "warnings": warnings,
        }
        # On one line: json indents in Python, which takes ten times as long for a large MoE.
        print(json.dumps(plan, default=list))
    else:
        on_paper = as_text(time, gpu, efficiency, config.cluster.gpus_per_node)
        print(as_table(spec, layout, engine_tp, buckets, dtype), on_paper, sep="\n\n")
        for text in warnings:
            print(f"warning: {text}")
    return 0


def as_table(
    spec: ModelSpec, actor: Layout, engine_tp: int, buckets: Sequence[Bucket], dtype: torch.dtype
) -> str:
    """One line per bucket, then what a rank of each stage gives and an engine's rank keeps, in
    MiB."""
    experts = f" x EP {actor.expert_parallel}" if spec.experts else ""
    padded = padded_vocab_size(spec.vocab, actor.tensor_parallel)
    lines = [
        f"{spec.architecture}, {spec.layers} layers, "
        f"{sum(one.num_bytes for one in buckets) / MIB:.1f} MiB in "
        f"{str(dtype).removeprefix('torch.')}, {'tied' if spec.tied else 'untied'} embedding",
        f"actor TP {actor.tensor_parallel} x PP {actor.pipeline_parallel}{experts} -> engine TP "
        f"{engine_tp}",
        f"vocabulary {spec.vocab}" + (f", padded to {padded}" if padded != spec.vocab else ""),
        "",
        f"{'bucket':>6}  {'MiB':>9}  {'tensors':>7}  first .. last",
    ]
    for number, one in enumerate(buckets):
        names = [t.meta.name for t in one.tensors]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        lines.append(f"{number:>6}  {one.num_bytes / MIB:>9.1f}  {len(names):>7}  {span}")
    lines.append("")
    for stage, chunks in enumerate(actor.stage_chunks(spec.layers)):
        given = parameters_of_rank(spec, actor, stage)
        given += expert_parameters_of_rank(spec, actor, stage)
        layers = ", ".join(f"{one[0]}-{one[-1]}" if one else "none" for one in chunks)
        size = given * dtype.itemsize / MIB
        lines.append(f"stage {stage}: layers {layers}; each rank has {size:.1f} MiB of them")
    kept = engine_weights_bytes(spec, engine_tp) / 2 * dtype.itemsize / MIB
    largest = max(one.num_bytes for one in buckets)
    lines += [
        f"an engine's rank keeps {kept:.1f} MiB",
        f"a receiving rank holds two buckets: {2 * largest / MIB:.1f} MiB at most",
    ]
    return "\n".join(lines)
