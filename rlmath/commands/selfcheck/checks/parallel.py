"""An update on two ranks against one rank, in each way to share it, and the link between them."""

from __future__ import annotations

import math
from pathlib import Path

import torch.distributed as dist

from rlmath.actor.communicators import describe, open_communicators
from rlmath.actor.plan import StepPlan
from rlmath.actor.policy import MegatronActor
from rlmath.commands.plan.measured import FIGURE
from rlmath.commands.selfcheck.checks.actor import LENGTHS, TOKENS_PER_PACK, in_turn
from rlmath.commands.selfcheck.material import actor_settings, random_batch
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.commands.selfcheck.worker import RECORD_FILE
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.model.spec import read_model_spec
from rlmath.validation.processes import ONE_RANK, on_ranks

# Largest relative difference of the gradient's norm; sums of bfloat16 are rounded in another order.
MOST_DIFFERENCE = {"bfloat16": 0.02, "float32": 1e-4}
LAYOUTS = {
    "DP 2": Layout(1, 1, 2),
    "TP 2": Layout(2, 1, 1),
    "PP 2": Layout(1, 2, 1),
    "CP 2": Layout(1, 1, 1, context_parallel=2),
}


def run(node: Node, record: Record) -> None:
    """One update of the same sequences on one rank, and in each layout of two."""
    if node.gpus == 1:
        record.not_applicable("", "it needs 2 GPUs, there is 1")
        return
    layouts = dict(LAYOUTS)
    if read_model_spec(node.model).experts:
        record.not_applicable("CP 2", "an MoE model takes whole sequences")
        del layouts["CP 2"]
    with record.phase("one rank"):
        norms = on_ranks(ONE_RANK, update_on_rank, (node, {"one rank": ONE_RANK}))
    with record.phase("two ranks, all layouts"):
        norms |= on_ranks(layouts["DP 2"], update_on_rank, (node, layouts))
    compare_norms(record, norms, MOST_DIFFERENCE[node.dtype])


def update_on_rank(platform: Platform, node: Node, layouts: dict[str, Layout]) -> dict[str, float]:
    """Gradient norm of an update in each layout; rank 0 reports the links between the ranks."""
    record = Record(Path(node.folder) / RECORD_FILE)
    batch, process_bytes = random_batch(node.model, LENGTHS), 0
    norms: dict[str, float] = {}
    settings = actor_settings(node, TOKENS_PER_PACK, max(LENGTHS))
    for name, layout in in_turn(layouts, platform):
        opened = open_communicators(layout, platform)
        if dist.get_rank() == 0:
            record.phase_begins(name)
            for link in opened.links[: not norms]:
                record.figure("all-reduce", link.gb_per_s, "GB/s", key=True)
                for line in describe([opened]):
                    record.require(not (node.on_cuda and line.startswith("warning")), line)
                if node.card is not None:
                    record.figure(FIGURE + "link", link.gb_per_s / node.card.link_gb_per_s)
            if opened.device_bytes is not None:
                record.figure(f"{name} communicators", opened.device_bytes / 2**30, "GiB")
            # Nothing else is on this GPU now: CUDA's context, libraries, and NCCL.
            process_bytes = max(process_bytes, platform.bytes_of_others() or 0)
        actor = MegatronActor(settings, layout, platform)
        result = actor.update(batch, StepPlan(), seed=0)
        norms[name] = float(result.minibatches[0]["grad_norm"])
        del actor
    if process_bytes and dist.get_rank() == 0 and len(layouts) > 1:
        record.figure(FIGURE + "actor_process_gib", process_bytes / 2**30)
    return norms


def compare_norms(record: Record, norms: dict[str, float], limit: float) -> None:
    """Hold the norm of each layout to that of one rank. ``norms``: by the layout's name; ``one
    rank`` among them. ``limit``: largest relative difference."""
    expected = norms["one rank"]
    record.figure("gradient norm on one rank", expected)
    worst = 0.0
    for name, norm in norms.items():
        difference = abs(norm - expected) / expected if expected > 0 else math.inf
        record.require(
            difference <= limit,
            f"{name}: the gradient's norm is {norm:.6g}, on one rank {expected:.6g}; they differ "
            f"by {difference:.2e}, above {limit:g}",
        )
        if name != "one rank":
            record.figure(f"{name} gradient norm", norm)
        worst = max(worst, difference)
    record.figure("worst difference of gradient norms", worst, limit=f"<= {limit:g}", key=True)
