"""The plan of an update as a table or as JSON: ``python -m rlmath.weights.plan_cli MODEL``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from rlmath.errors import UserError
from rlmath.weights.plan import (
    Operation,
    PlannedBucket,
    SourceLayout,
    SourceRank,
    TargetLayout,
    WeightsPlan,
    plan_weights,
)
from rlmath.weights.shape import read_model_shape

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="Hugging Face folder; only its config.json is read")
    parser.add_argument("--tp", type=int, default=1, help="trainer: tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="trainer: pipeline stages")
    parser.add_argument("--ep", type=int, default=1, help="trainer: expert-parallel ranks")
    parser.add_argument(
        "--expert-tp", type=int, help="trainer: tensor-parallel ranks within experts (default: tp)"
    )
    parser.add_argument("--virtual-stages", type=int, default=1, help="trainer: chunks per stage")
    parser.add_argument("--first-stage-layers", type=int, help="trainer: layers of stage 0")
    parser.add_argument("--last-stage-layers", type=int, help="trainer: layers of the last stage")
    parser.add_argument("--engine-tp", type=int, default=1, help="engine: tensor-parallel ranks")
    parser.add_argument(
        "--engine-expert-parallel", action="store_true", help="engine: whole experts per rank"
    )
    parser.add_argument("--bucket-size-mib", type=float, default=512.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="every operation, as JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; raises ``WeightsError`` where there is no plan."""
    parser = argparse.ArgumentParser(description="which bytes an update of the weights moves")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Print the plan that the options ask for; raises ``WeightsError`` where there is none."""
    plan = plan_weights(
        read_model_shape(arguments.model),
        SourceLayout(
            tp=arguments.tp,
            pp=arguments.pp,
            ep=arguments.ep,
            expert_tp=arguments.expert_tp,
            virtual_stages=arguments.virtual_stages,
            first_stage_layers=arguments.first_stage_layers,
            last_stage_layers=arguments.last_stage_layers,
        ),
        TargetLayout(arguments.engine_tp, arguments.engine_expert_parallel),
        arguments.bucket_size_mib,
        getattr(torch, arguments.dtype),
    )
    print(json.dumps(as_json(plan), indent=1) if arguments.json else as_table(plan))
    return 0


def as_json(plan: WeightsPlan) -> dict[str, Any]:
    """The whole plan in JSON's types."""
    return {
        "architecture": plan.shape.architecture,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "num_bytes": plan.num_bytes,
        "padded_vocab": plan.padded_vocab,
        "source": vars(plan.source),
        "target": vars(plan.target),
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
    source, shape = plan.source, plan.shape
    experts = f" x EP {source.ep}" if shape.experts else ""
    lines = [
        f"{shape.architecture}, {shape.layers} layers, {plan.num_bytes / MIB:.1f} MiB in "
        f"{str(plan.dtype).removeprefix('torch.')}, {'tied' if shape.tied else 'untied'} embedding",
        f"trainer TP {source.tp} x PP {source.pp}{experts} -> engine TP {plan.target.tp}",
        f"vocabulary {shape.vocab}"
        + (f", padded to {plan.padded_vocab}" if plan.padded_vocab != shape.vocab else ""),
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
