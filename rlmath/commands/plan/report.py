"""Plans as a table for people and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rlmath.checks.latent import ON_CPU_ALONE
from rlmath.commands.plan.engine_memory import ENGINE_STEP_TOKENS
from rlmath.commands.plan.gpus import Gpu
from rlmath.commands.plan.layouts import EQUAL_SHARE, Plan, most_tokens
from rlmath.commands.plan.memory import GIB, usable_bytes
from rlmath.commands.plan.plan_settings import overrides
from rlmath.commands.plan.wish import Wish
from rlmath.model.spec import ModelSpec

# A longer step than this is hardly meant.
LONG_STEP_S = 3600.0


def as_json(wish: Wish, plans: Sequence[Plan]) -> dict[str, Any]:
    """Everything: what was asked, what was assumed, and each plan with its terms."""
    return {
        "model": wish.path,
        "parameters": wish.spec.num_parameters,
        "gpu": dataclasses.asdict(wish.gpu),
        "gpus": wish.gpus,
        "gpus_per_node": wish.gpus_per_node,
        "usable_gib": usable_bytes(wish.gpu.memory_gib) / GIB,
        "step": dataclasses.asdict(wish.work),
        "assumptions": dataclasses.asdict(wish.efficiency),
        "warnings": warnings(wish, plans[0]),
        "plans": [_plan_json(wish, plan) for plan in plans],
    }


def _plan_json(wish: Wish, plan: Plan) -> dict[str, Any]:
    return {
        "actor": dataclasses.asdict(plan.actor),
        "engines": plan.engines,
        "engine_tensor_parallel": plan.engine_tp,
        "gpu_memory_utilization": plan.engine_share,
        "cache_tokens": plan.cache_tokens,
        "most_tokens_per_microbatch": most_tokens(wish, plan.actor),
        "running_sequences": plan.running,
        "host_gib_per_node": plan.host_bytes / GIB,
        "phases_gib": {
            phase.name: {name: size / GIB for name, size in phase.terms.items()}
            for phase in plan.phases
        },
        "seconds": plan.seconds,
        "step_s": plan.step_s,
        "overrides": overrides(wish, plan.actor, plan.engine_tp, plan.engine_share),
    }


def as_text(wish: Wish, plans: Sequence[Plan], most: int, batch: str) -> str:
    """The fastest plans, the best one's peaks and settings, and what was assumed."""
    work, best = wish.work, plans[0]
    head = [
        "TP",
        "PP",
        "CP",
        "EP",
        "DP",
        "recompute",
        "engines",
        "share",
        "cache",
        "running",
        "peak GiB",
    ]
    head += ["generate", "log-probs", "update", "weight sync"]
    head += [*(["offload"] if offloads(wish) else []), "step s"]
    rows = [head, *(_row(wish, plan) for plan in plans[:most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        f"{wish.path}: {wish.spec.num_parameters / 1e9:.3f} billion parameters, {wish.gpus} "
        f"{wish.gpu.name} of {wish.gpu.memory_gib:g} GiB in nodes of {wish.gpus_per_node}; "
        f"{usable_bytes(wish.gpu.memory_gib) / GIB:.1f} GiB are planned with",
        f"layouts that fit: {len(plans)}, the fastest first, of those within "
        f"{EQUAL_SHARE:.0%} the simplest (predicted seconds)",
        "",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ),
        "",
        "the first one, GiB on the fullest GPU:",
        *(f"  {phase.name:<14} {_terms(phase.terms)}" for phase in best.phases),
        f"  host memory of a node: {best.host_bytes / GIB:.0f} GiB for checkpoints"
        + (", the reference model" if wish.reference else "")
        + (", routes of a step" if wish.replays else "")
        + (", the base model of sleeping engines" if wish.unmerged else "")
        + (f" and what actor.offload={wish.offload} moves there" if offloads(wish) else ""),
        f"  a micro-batch of {best.actor.max_tokens:,} tokens; with every layer recomputed "
        f"{most_tokens(wish, best.actor):,} fit",
        "",
        batch,
        "",
        "its settings:",
        *(f"  {line}" for line in overrides(wish, best.actor, best.engine_tp, best.engine_share)),
        "",
        *_assumptions(wish),
    ]
    lines += [f"warning: {text}" for text in warnings(wish, best)]
    if work.mean_response_tokens * 2 == work.response_tokens:
        lines.append("  the mean response is taken as half of the longest: --mean-response-tokens")
    return "\n".join(lines)


def warnings(wish: Wish, best: Plan) -> list[str]:
    """What a user should know before starting the first layout."""
    found = []
    if best.step_s > LONG_STEP_S:
        fewer = max(1, 2 ** int(math.log2(wish.work.prompts * LONG_STEP_S / 4 / best.step_s)))
        found.append(
            f"a step takes about {best.step_s / 3600:.1f} hours: {wish.work.prompts} x "
            f"{wish.work.group_size} samples of up to {wish.work.response_tokens:,} tokens on "
            f"{wish.gpus} GPUs. algorithm.prompts_per_step={fewer} takes about a quarter of an "
            "hour; rollout.max_response_tokens is the other way"
        )
    return [*found, *not_trained(wish.spec, wish.gpu)]


def not_trained(spec: ModelSpec, gpu: Gpu) -> list[str]:
    """Why the model cannot be trained on these GPUs; empty: it can, as far as is known."""
    found = []
    if spec.latent is not None:
        found.append(f"multi-head latent attention {ON_CPU_ALONE}; this is for comparison only")
    if not gpu.runs:
        found.append(f"rlmath has no builds for {gpu.name}; this is for comparison only")
    return found


def _row(wish: Wish, plan: Plan) -> list[str]:
    actor, seconds = plan.actor, plan.seconds
    layout = actor.layout
    per_stage = max(layout.stage_sizes(wish.spec.layers))
    return [
        str(layout.tensor_parallel),
        str(layout.pipeline_parallel),
        str(layout.context_parallel),
        str(layout.expert_parallel),
        str(layout.data_parallel),
        f"{actor.recompute_layers}/{per_stage}",
        f"{plan.engines} x TP {plan.engine_tp}",
        f"{plan.engine_share:.2f}",
        f"{plan.cache_tokens:,}",
        str(plan.running),
        f"{plan.peak.num_bytes / GIB:.1f} {plan.peak.name}",
        *(f"{seconds[name]:,.0f}" for name in ("generate", "log_probs", "update", "weight_sync")),
        *([f"{seconds['offload']:,.0f}"] if offloads(wish) else []),
        f"{plan.step_s:,.0f}",
    ]


def _terms(terms: Any) -> str:
    parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in terms.items())
    return f"{sum(terms.values()) / GIB:5.1f} = {parts}"


def _assumptions(wish: Wish) -> list[str]:
    gpu, efficiency = wish.gpu, wish.efficiency
    return [
        "assumed (docs/gpu_results.md has what was measured on one H100):",
        f"  actor: {efficiency.mfu:g} of {gpu.peak_tflops:g} TFLOPS, but "
        f"{1000 * efficiency.layer_launch_s:g} ms a layer and micro-batch at least; links "
        f"{efficiency.link:g} of {gpu.link_gb_per_s:g} GB/s in a node and "
        f"{efficiency.network_gb_per_s:g} GB/s between",
        f"  sampling: {efficiency.decode_bandwidth:g} of {gpu.memory_gb_per_s:g} GB/s, "
        f"{1000 * efficiency.decode_step_s:g} ms a step beside; {efficiency.tail_share:.0%} of an "
        f"engine's sequences run to the limit; {ENGINE_STEP_TOKENS:,} tokens of prompts a step",
        *_fp8_assumption(wish),
        f"  memory: bfloat16, flash attention, distributed optimizer, {wish.layers} layers;",
        "  engines sleep while the actor works; "
        + (
            f"what actor.offload={wish.offload} moves takes {efficiency.host_gb_per_s:g} GB/s each "
            "way, beside nothing else"
            if offloads(wish)
            else "its state stays on the GPU"
        ),
    ]


def _fp8_assumption(wish: Wish) -> list[str]:
    if wish.fp8 is None:
        return []
    return [
        f"  actor.fp8={wish.fp8.format}: {wish.efficiency.mfu:g} of {wish.gpu.fp8_tflops:g} TFLOPS "
        "in the matrices of layers, and their inputs to memory and back; arithmetic alone, it has "
        "never run",
    ]


def offloads(wish: Wish) -> bool:
    """Whether state of the actor leaves the GPU."""
    return wish.offload not in (None, "none")
