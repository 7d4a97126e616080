"""Megatron's log-probs against those of transformers, at each kind of parallelism."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlmath.actor.parallel import destroy, initialize
from rlmath.actor.policy import MegatronActor
from rlmath.algorithms.mismatch import measure
from rlmath.commands.selfcheck.material import actor_settings, random_batch
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.commands.selfcheck.worker import RECORD_FILE
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.model.precision import log_prob_limit
from rlmath.model.spec import read_model_spec
from rlmath.types import TrainingBatch
from rlmath.validation.compare import Comparison, comparison, gathered_log_probs
from rlmath.validation.hf_log_probs import hf_log_probs
from rlmath.validation.processes import free_port, on_ranks

# Uneven, so that a pack has boundaries inside; two packs and more for every rank.
LENGTHS = [192, 16, 77, 130, 40, 99, 61, 150]
TOKENS_PER_PACK = 320
UNFUSED = "unfused (Transformer Engine)"


def run(node: Node, record: Record) -> None:
    """Compare on random sequences, several of which are packed into each micro-batch."""
    batch = random_batch(node.model, LENGTHS)
    record.figure("tokens compared", int(batch.response_lengths.sum()))
    with record.phase("transformers"):
        expected = hf_log_probs(node.model, batch, 1.0)
    layouts = _layouts(node, record)
    # Two processes take all layouts in turn: most of a rank's start is imports.
    arguments = (node, batch, expected, layouts)
    with record.phase("ranks, all layouts"):
        worst_mean, worst = on_ranks(next(iter(layouts.values())), compare_on_rank, arguments)
    record.figure("worst mean exp|Δ|", worst_mean, key=True)
    record.figure("worst |Δ|", worst, "nats", key=True)


def _layouts(node: Node, record: Record) -> dict[str, Layout]:
    if node.gpus == 1:
        for name in ("TP 2", "CP 2"):
            record.not_applicable(name, "it needs 2 GPUs, there is 1")
        return {"TP 1": Layout(1, 1, 1)}
    layouts = {"TP 1 (DP 2)": Layout(1, 1, 2), "TP 2": Layout(2, 1, 1)}
    if read_model_spec(node.model).experts:
        record.not_applicable("CP 2", "an MoE model takes whole sequences")
        return layouts
    return layouts | {"CP 2": Layout(1, 1, 1, context_parallel=2)}


def compare_on_rank(
    platform: Platform,
    node: Node,
    batch: TrainingBatch,
    expected: Tensor,
    layouts: dict[str, Layout],
) -> tuple[float, float]:
    """On each rank: take the log-probs in each layout; rank 0 reports. Returns over the layouts,
    the largest mean exp|Δ| and the largest |Δ|."""
    record = Record(Path(node.folder) / RECORD_FILE)
    rank, worst_mean, worst = dist.get_rank(), 0.0, 0.0
    settings = actor_settings(node, TOKENS_PER_PACK, max(LENGTHS), trains=False)
    for name, layout in in_turn(layouts, platform):
        if rank == 0:
            record.phase_begins(name)
        actor = MegatronActor(settings, layout, platform)
        found, noisy = (gathered_log_probs(actor, batch, one) for one in ("policy", "noise"))
        backend = attention_backend(platform)
        if rank == 0:
            compared = comparison(("megatron", "transformers"), found, expected, batch)
            report(record, name, compared, backend, _limit(node, found, noisy))
            values = compared.metrics()
            worst_mean = max(worst_mean, values["mean_exp_abs_diff"])
            worst = max(worst, values["max_abs_diff"])
        del actor
    return worst_mean, worst


def report(record: Record, name: str, compared: Comparison, backend: str, limit: float) -> None:
    values = compared.metrics()
    record.figure(f"{name} mean |Δ|", values["mean_abs_diff"], "nats")
    record.figure(f"{name} max |Δ|", values["max_abs_diff"], "nats")
    record.figure(f"{name} mean exp|Δ|", values["mean_exp_abs_diff"], limit=f"<= {limit:g}")
    record.figure(f"{name} attention", backend)
    record.require(
        values["mean_exp_abs_diff"] <= limit,
        f"{name}: mean exp|Δ| of log-probs is {values['mean_exp_abs_diff']:.6f}, above "
        f"{limit:g}; worst at {compared.worst()}",
    )
    record.require(
        backend != UNFUSED,
        f"{name}: Transformer Engine took its unfused attention, which stores all scores",
        "Set NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 and run this check again: its log says why cuDNN was "
        "not taken.",
    )


def attention_backend(platform: Platform) -> str:
    """The attention backend of this process: cuDNN, flash attention or an unfused computation as
    Transformer Engine chose it, or torch's operator where that is not used."""
    if platform.layer_spec != "transformer_engine":
        return "torch scaled_dot_product_attention"
    # By name first: some modules of other packages import more when they are asked for a name.
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        # All are None until attention has been computed once; the order is Transformer Engine's.
        chosen: dict[str, Any] = getattr(sys.modules[name], "_attention_backends", None) or {}
        if chosen.get("use_flash_attention"):
            return f"flash attention {chosen.get('flash_attention_backend')}"
        if chosen.get("use_fused_attention"):
            return f"cuDNN ({chosen.get('fused_attention_backend')})"
        if chosen.get("use_unfused_attention"):
            return UNFUSED
    return "Transformer Engine's, which does not say which"


def _limit(node: Node, found: Tensor, noisy: Tensor) -> float:
    """Limit from the rounding noise of this model, which is large on random text."""
    is_moe = read_model_spec(node.model).experts > 0
    excess = measure(found, noisy).metrics()["mean_exp_abs_diff"] - 1
    return log_prob_limit(node.dtype == "float32", is_moe, excess)


def in_turn(layouts: dict[str, Layout], platform: Platform) -> Iterator[tuple[str, Layout]]:
    """On each rank, iterate over the layouts, with their process groups made and the memory of the
    layout before freed."""
    for number, (name, layout) in enumerate(layouts.items()):
        if number:
            gc.collect()
            platform.release_cached_memory()
            _change_layout(layout, platform)
        yield name, layout


def _change_layout(layout: Layout, platform: Platform) -> None:
    """Leave the process groups and make those of another layout with as many ranks."""
    place, rank = [0], dist.get_rank()
    if rank == 0:
        place = [free_port()]
    dist.broadcast_object_list(place, src=0)
    destroy()
    initialize(layout, platform, rank=rank, address="127.0.0.1", port=place[0], seed=0)
