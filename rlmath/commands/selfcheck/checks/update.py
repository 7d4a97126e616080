"""Memory and time of updates and log-probs against the plan: model FLOPs utilization (MFU), and the
host's time of a layer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rlmath.actor.head_rows import rows_per_chunk
from rlmath.actor.plan import StepPlan
from rlmath.actor.policy import MegatronActor
from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.measured import FIGURE
from rlmath.commands.plan.memory import (
    ACTOR_PROCESS_GIB,
    GIB,
    ActorShape,
    Step,
    actor_phases,
    usable_bytes,
)
from rlmath.commands.plan.time import Work, actor_time_s, forward_flops
from rlmath.commands.selfcheck.kernels import compare_fingerprints, compare_softmax
from rlmath.commands.selfcheck.material import actor_settings, random_batch
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.commands.selfcheck.worker import RECORD_FILE
from rlmath.device import Platform
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.validation.processes import ONE_RANK, on_ranks

# Tokens of a sequence, each its own micro-batch. The plan's MFU is that of MFU_TOKENS.
LENGTHS = {"cuda": (4096, 8192, 16384, 32768), "cpu": (256, 1024)}
MFU_TOKENS = 16384
# So few that a GPU has computed a layer before the host has launched the next.
LAUNCH_TOKENS = 256
MICROBATCHES = 4
# Reading them takes longer than a launch.
FINGERPRINT_ROWS = 2**16 + 11
# The fastest counts: the first ones of a process also wait for a GPU that has been idle.
TIMED = 3
PROMPT_TOKENS = 4
# Relative error of memory that the plan promises.
PLAN_TOLERANCE = 0.1
# Above this multiple of the planned time something is not fused, or falls back. The plan knows that
# short micro-batches wait for the host, whose speed differs: 1.6 was measured, see
# docs/gpu_results.md.
MOST_OF_PLANNED_TIME = 2.0


def run(node: Node, record: Record) -> None:
    """Updates and log-probs of each length on one rank, of which the fastest count."""
    if not node.on_cuda:
        reason = "memory and speed of a CPU are not planned for"
        record.not_applicable("memory against the plan, MFU, launches", reason)
        record.not_applicable("Triton's kernels", "Triton compiles for GPUs")
    with record.phase("rank"):
        on_ranks(ONE_RANK, update_on_rank, (node,))


@dataclass(frozen=True)
class Measured:
    """An update of ``MICROBATCHES`` sequences, and their log-probs."""

    tokens: int  # Length of a sequence.
    seconds: float  # The fastest update.
    log_probs_s: float  # The fastest log-probs.
    peak_gib: float  # Highest memory of the rank in an update.
    grad_norm: float


def update_on_rank(platform: Platform, node: Node) -> None:
    record = Record(Path(node.folder) / RECORD_FILE)
    spec = read_model_spec(node.model)
    for tokens in sorted({min(one, spec.max_positions) for one in LENGTHS[node.device]}):
        planned = None
        if node.on_cuda:
            planned = least_recompute(spec, node, tokens, platform.layer_spec)
        recompute = planned.recompute_layers if planned else 0
        with record.phase(f"{tokens} tokens"):
            measured = measure(platform, node, tokens, recompute)
        report(record, node, spec, measured, planned)
    if node.on_cuda:
        with record.phase("launches"):
            report_launches(record, spec, measure(platform, node, LAUNCH_TOKENS, 0))
        with record.phase("Triton's kernels"):
            rows = rows_per_chunk(spec.vocab, element_bytes=2)
            compare_softmax(platform, record, spec.vocab, rows, getattr(torch, node.dtype))
            compare_fingerprints(platform, record, FINGERPRINT_ROWS)


def least_recompute(
    spec: ModelSpec, node: Node, tokens: int, layers_of: str = "transformer_engine"
) -> ActorShape:
    """The layout of one rank with as few recomputed layers as the plan lets fit. Raises UserError:
    none fits."""
    for layers in range(spec.layers + 1):
        actor = ActorShape(Layout(), layers, tokens, layers=layers_of)
        if planned_gib(spec, actor) + ACTOR_PROCESS_GIB <= usable_bytes(node.gpu_gib) / GIB:
            return actor
    raise UserError(
        f"an update of {tokens} tokens does not fit one GPU of {node.gpu_gib:.0f} GiB, with every "
        f"layer recomputed: {planned_gib(spec, actor):.1f} GiB are planned; give the "
        "model.path of a smaller model"
    )


def planned_gib(spec: ModelSpec, actor: ActorShape) -> float:
    step = Step(MICROBATCHES, longest_tokens=actor.max_tokens)
    update = ("logits", "training", "optimizer step")
    phases = actor_phases(spec, actor, step)
    peak = max(phase.num_bytes for phase in phases if phase.name in update)
    return peak / GIB - ACTOR_PROCESS_GIB


def planned_seconds(spec: ModelSpec, actor: ActorShape, card: Gpu) -> tuple[float, float]:
    response = actor.max_tokens - PROMPT_TOKENS
    log_probs_s, update_s = (
        actor_time_s(
            spec,
            actor,
            Work(MICROBATCHES, 1, minibatches, PROMPT_TOKENS, response, response),
            card,
            Efficiency(),
            gpus_per_node=1,
        )[phase]
        # A step of one minibatch has no pass for log-probs.
        for phase, minibatches in ((0, 2), (1, 1))
    )
    return log_probs_s, update_s


def measure(platform: Platform, node: Node, tokens: int, recompute: int) -> Measured:
    """An update and log-probs of ``MICROBATCHES`` sequences, after those that warm up."""
    try:
        return _measure(platform, node, tokens, recompute)
    finally:
        gc.collect()
        platform.release_cached_memory()


def _measure(platform: Platform, node: Node, tokens: int, recompute: int) -> Measured:
    settings = actor_settings(node, tokens, tokens, recompute=recompute)
    actor = MegatronActor(settings, ONE_RANK, platform)
    batch = random_batch(node.model, [tokens] * MICROBATCHES, PROMPT_TOKENS)
    norm = actor.update(batch, StepPlan(), seed=0).minibatches[0]["grad_norm"]
    platform.reset_peak_memory()
    update_s = _fastest(platform, lambda seed: actor.update(batch, StepPlan(), seed))
    peak_gib = platform.peak_memory_gib()
    actor.log_probs(batch)
    log_probs_s = _fastest(platform, lambda seed: actor.log_probs(batch))
    return Measured(tokens, update_s, log_probs_s, peak_gib, norm)


def _fastest(platform: Platform, action: Callable[[int], object]) -> float:
    seconds = []
    for seed in range(1, TIMED + 1):
        platform.synchronize()
        started_s = time.perf_counter()
        action(seed)
        platform.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


def report_launches(record: Record, spec: ModelSpec, measured: Measured) -> None:
    """The host's time of a layer, which is all that passes of so few tokens take."""
    layers = MICROBATCHES * spec.layers
    planned_s = Efficiency().layer_launch_s
    # The backward pass launches about twice as many kernels.
    launch_s = measured.seconds / layers / 3
    record.figure("host time of a layer, forward", 1e3 * measured.log_probs_s / layers, "ms")
    record.figure("host time of a layer, update / 3", 1e3 * launch_s, "ms", key=True)
    record.figure("planned host time of a layer", 1e3 * planned_s, "ms")
    record.figure(FIGURE + "layer_launch_s", launch_s)


def report(
    record: Record, node: Node, spec: ModelSpec, measured: Measured, planned: ActorShape | None
) -> None:
    """The figures of one length; with a plan, held to it."""
    name, seconds = f"{measured.tokens} tokens", measured.seconds
    tokens = MICROBATCHES * measured.tokens
    # Backward is two forward passes; what is recomputed does not count (Chowdhery et al. 2022,
    # appendix B).
    flops_per_s = 3 * forward_flops(spec, measured.tokens) * tokens / seconds
    record.figure(f"{name} update", seconds, "s")
    record.figure(f"{name} throughput", tokens / seconds, "tokens/s")
    record.figure(f"{name} model FLOPs", flops_per_s / 1e12, "TFLOP/s", key=not node.on_cuda)
    record.figure(f"{name} log-probs", measured.log_probs_s, "s")
    record.figure(f"{name} gradient norm", measured.grad_norm)
    record.figure(f"{name} peak memory", measured.peak_gib, "GiB")
    record.require(
        0 < measured.grad_norm < float("inf"),
        f"{name}: the gradient's norm is {measured.grad_norm}",
    )
    if planned is None:
        return
    promised = planned_gib(spec, planned)
    most = (1 + PLAN_TOLERANCE) * promised
    ratio = measured.peak_gib / promised
    record.figure(f"{name} recomputed layers", f"{planned.recompute_layers} of {spec.layers}")
    record.figure(f"{name} planned memory", promised, "GiB")
    record.figure(f"{name} memory / plan", ratio, limit=f"<= {1 + PLAN_TOLERANCE:g}", key=True)
    record.require(
        measured.peak_gib <= most,
        f"{name}: the update's peak is {measured.peak_gib:.1f} GiB, the plan says {promised:.1f}",
        "Report this with the file. Until then plan with less: rlmath plan layout --gpu-gib "
        f"{node.gpu_gib / ratio:.0f}.",
    )
    if node.card is None:
        reason = f"{node.gpu_name} is not in rlmath/commands/plan/gpus.py, so its peak is not known"
        record.not_applicable(f"{name} MFU", reason)
        return
    log_probs_s, planned_s = planned_seconds(spec, planned, node.card)
    ratio, peak = seconds / planned_s, node.card.peak_tflops * 1e12
    mfu, forward = flops_per_s / peak, flops_per_s * seconds / 3 / peak
    record.figure(f"{name} MFU", mfu, key=True)
    record.figure(f"{name} planned MFU", mfu * ratio)
    record.figure(f"{name} planned time", planned_s, "s")
    record.figure(f"{name} log-probs MFU", forward / measured.log_probs_s, key=True)
    record.figure(f"{name} planned log-probs MFU", forward / log_probs_s)
    if measured.tokens == MFU_TOKENS:
        record.figure(FIGURE + "mfu", Efficiency().mfu / ratio)
    record.figure(f"{name} time / plan", ratio, limit=f"<= {MOST_OF_PLANNED_TIME:g}", key=True)
    record.require(
        ratio <= MOST_OF_PLANNED_TIME,
        f"{name}: the update took {seconds:.2f} s, {ratio:.1f} times the planned {planned_s:.2f} "
        f"s; more than {MOST_OF_PLANNED_TIME:g} means that something falls back to slow kernels, "
        "or that the host launches kernels too slowly",
        "Look at the attention backend in the check `actor` and at Transformer Engine in the check "
        "`environment`; if only the shorter update is slow, other processes use the CPU.",
    )
