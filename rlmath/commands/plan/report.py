from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rlmath.checks.latent import ON_CPU_ALONE
from rlmath.commands.plan.engine_memory import ENGINE_STEP_TOKENS
from rlmath.commands.plan.faster import proposals
from rlmath.commands.plan.gpus import Gpu
from rlmath.commands.plan.layouts import EQUAL_SHARE, Plan, most_tokens
from rlmath.commands.plan.memory import GIB, usable_bytes
from rlmath.commands.plan.request import PlanRequest, overrides
from rlmath.commands.plan.time import Work, with_calls_s
from rlmath.model.spec import ModelSpec

# A step longer than this is probably unintended.
LONG_STEP_S = 3600.0


def as_json(request: PlanRequest, plans: Sequence[Plan]) -> dict[str, Any]:
    """The request, the assumptions, and each plan with its terms."""
    return {
        "model": request.path,
        "parameters": request.spec.num_parameters,
        "gpu": dataclasses.asdict(request.gpu),
        "gpus": request.gpus,
        "gpus_per_node": request.gpus_per_node,
        "usable_gib": usable_bytes(request.gpu.memory_gib) / GIB,
        "step": dataclasses.asdict(request.work),
        "assumptions": dataclasses.asdict(request.efficiency),
        "warnings": warnings(request, plans[0]),
        "plans": [_plan_json(request, plan) for plan in plans],
    }


def _plan_json(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    return {
        "actor": dataclasses.asdict(plan.actor),
        "engines": plan.engines,
        "engine_tensor_parallel": plan.engine_tp,
        "gpu_memory_utilization": plan.engine_share,
        "cache_tokens": plan.cache_tokens,
        "most_tokens_per_microbatch": most_tokens(request, plan),
        "running_sequences": plan.running,
        "host_gib_per_node": plan.host_bytes / GIB,
        "phases_gib": {
            phase.name: {name: size / GIB for name, size in phase.terms.items()}
            for phase in plan.phases
        },
        "seconds": plan.seconds,
        "step_s": plan.step_s,
        "overrides": overrides(request, plan),
    }


def as_text(request: PlanRequest, plans: Sequence[Plan], most: int, batch: str) -> str:
    """The fastest plans, the best one's peaks and settings, and the assumptions."""
    work, best, gpu, gpus = request.work, plans[0], request.gpu, request.gpus
    moved = f"what actor.offload={best.step.offload} moves"
    head = ["TP", "PP", "CP", "EP", "DP", "recompute", "engines", "share", "cache", "running"]
    head += ["peak GiB", "generate", "log-probs", "update", "weight sync"]
    head += [*(["offload"] if request.offloads else []), "step s"]
    rows = [head, *(_row(request, plan) for plan in plans[:most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        f"{request.path}: {request.spec.num_parameters / 1e9:.3f} billion parameters, {gpus} "
        f"{gpu.name} of {gpu.memory_gib:g} GiB in nodes of {request.gpus_per_node}; "
        f"{usable_bytes(gpu.memory_gib) / GIB:.1f} GiB are planned with",
        f"layouts that fit: {len(plans)}; the {len(rows) - 1} fastest, of those within "
        f"{EQUAL_SHARE:.0%} the simplest first (predicted seconds; cache in tokens, running in "
        "sequences)",
        "",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ),
        "",
        "the first one, GiB on the fullest GPU:",
        *(
            f"  {phase.name:<14} {phase.num_bytes / GIB:5.1f} = "
            + " + ".join(f"{name} {size / GIB:.1f}" for name, size in phase.terms.items())
            for phase in best.phases
        ),
        f"  host memory of a node: {best.host_bytes / GIB:.0f} GiB for checkpoints"
        + (", the reference model" if best.step.reference else "")
        + (", routes of a step" if best.step.replayed_tokens else "")
        + (", the base model of sleeping engines" if best.actor.engine_adapters else "")
        + (f" and {moved} there" if request.offloads else ""),
        f"  a micro-batch of {best.actor.max_tokens:,} tokens; with every layer recomputed "
        f"{most_tokens(request, best):,} fit",
        "",
        batch,
        "",
        "its settings:",
        *(f"  {line}" for line in overrides(request, best)),
        "",
        *_faster(request, best),
        *_assumptions(request, best),
    ]
    lines += [f"warning: {text}" for text in warnings(request, best)]
    if work.mean_response_tokens * 2 == work.response_tokens:
        lines.append("  the mean response is taken as half of the longest: --mean-response-tokens")
    return "\n".join(lines)


def _faster(request: PlanRequest, best: Plan) -> list[str]:
    found = proposals(request, best)
    if not found:
        return []
    head = (
        f"faster than {best.step_s:,.0f} s, with corrected samples, watched by the alignment gate:"
    )
    return [head, *(f"  {line}" for line in found), ""]


def warnings(request: PlanRequest, best: Plan) -> list[str]:
    found, work = [], request.work
    if best.step_s > LONG_STEP_S:
        fewer = max(1, 2 ** int(math.log2(work.prompts * LONG_STEP_S / 4 / best.step_s)))
        found.append(
            f"a step takes about {best.step_s / 3600:.1f} hours: {work.prompts} x "
            f"{work.group_size} samples of up to {work.response_tokens:,} tokens on "
            f"{request.gpus} GPUs. algorithm.prompts_per_step={fewer} takes about a quarter of an "
            "hour; rollout.max_response_tokens is the other way"
        )
    return [*found, *not_trained(request.spec, request.gpu)]


def not_trained(spec: ModelSpec, gpu: Gpu) -> list[str]:
    """Why the model cannot be trained on these GPUs; empty: it can, as far as is known."""
    found = []
    if spec.latent is not None:
        found.append(f"multi-head latent attention {ON_CPU_ALONE}; this is for comparison only")
    if not gpu.runs:
        found.append(f"rlmath has no builds for {gpu.name}; this is for comparison only")
    return found


def _row(request: PlanRequest, plan: Plan) -> list[str]:
    actor, seconds = plan.actor, plan.seconds
    layout = actor.layout
    per_stage = max(layout.stage_sizes(request.spec.layers))
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
        *([f"{seconds['offload']:,.0f}"] if request.offloads else []),
        f"{plan.step_s:,.0f}",
    ]


def _assumptions(request: PlanRequest, best: Plan) -> list[str]:
    gpu, efficiency, step = request.gpu, request.efficiency, best.step
    return [
        "assumed (docs/gpu_results.md has what was measured on one H100):",
        f"  actor: {efficiency.mfu:g} of {gpu.peak_tflops:g} TFLOPS, but "
        f"{1000 * efficiency.layer_launch_s:g} ms a layer and micro-batch at least; links "
        f"{efficiency.link:g} of {gpu.link_gb_per_s:g} GB/s in a node and "
        f"{efficiency.network_gb_per_s:g} GB/s between",
        f"  sampling: {efficiency.decode_bandwidth:g} of {gpu.memory_gb_per_s:g} GB/s, "
        f"{1000 * efficiency.decode_step_s:g} ms a step beside; {efficiency.tail_share:.0%} of an "
        f"engine's sequences run to the limit; {ENGINE_STEP_TOKENS:,} tokens of prompts a step",
        *_fp8_assumption(request, best),
        *_calls_assumption(request.work),
        f"  memory: bfloat16, flash attention, distributed optimizer, {best.actor.layers} layers;",
        "  engines sleep while the actor works; "
        + (
            f"what actor.offload={step.offload} moves takes {efficiency.host_gb_per_s:g} GB/s each "
            "way, beside nothing else"
            if request.offloads
            else "its state stays on the GPU"
        ),
    ]


def _calls_assumption(work: Work) -> list[str]:
    if not work.calls:
        return []
    return [
        f"  tools: {work.calls:g} calls of {work.call_s:g} s in a response (--calls, --call-s), "
        f"{work.parallel_calls} at once (rollout.parallel_calls); all of a step take "
        f"{with_calls_s(0.0, work):,.0f} s, while engines sample"
    ]


def _fp8_assumption(request: PlanRequest, best: Plan) -> list[str]:
    fp8, gpu = best.actor.fp8, request.gpu
    if fp8 is None:
        return []
    return [
        f"  actor.fp8={fp8.format}: {request.efficiency.mfu:g} of {gpu.fp8_tflops:g} TFLOPS "
        "in the matrices of layers, and their inputs to memory and back; arithmetic alone, it has "
        "never run",
    ]
