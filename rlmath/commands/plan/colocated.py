"""Memory of actor and engine on a GPU that they share, from a layout or from settings."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.algorithms.advantages import needs_value_model
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.engine_adapters import inbox_bytes, slot_bytes
from rlmath.commands.plan.engine_memory import (
    ENGINE_PROCESS_GIB,
    engine_step_bytes,
    engine_sync_bytes,
    engine_weights_bytes,
    kv_bytes,
)
from rlmath.commands.plan.memory import COPYING, GIB, MIB, Phase, Step, actor_phases
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.forward_tokens import forward_tokens
from rlmath.config.fp8_training import fp8_of
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.recompute import modules_of
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Config, Device
from rlmath.config.weights import bucket_mib
from rlmath.model.lora import Lora
from rlmath.model.spec import ModelSpec


def beside_sleeping_engine(spec: ModelSpec, actor: ActorShape, step: Step) -> list[Phase]:
    """The actor's phases, with the memory that a sleeping engine keeps."""
    asleep = {"engine process": ENGINE_PROCESS_GIB * GIB}
    return [Phase(one.name, {**one.terms, **asleep}) for one in actor_phases(spec, actor, step)]


def resident_bytes(phases: Sequence[Phase]) -> float:
    """Bytes that the actor keeps while the engine samples."""
    state = next(phase for phase in phases if phase.name == "state")
    return state.num_bytes - ENGINE_PROCESS_GIB * GIB


def with_awake_engine(
    spec: ModelSpec,
    phases: Sequence[Phase],
    step: Step,
    engine_tp: int,
    engine_bytes: float,
    adapters: Lora | None = None,
) -> list[Phase]:
    """The phases of a step: those of the actor, the weight sync, and the engine's waking up.

    Engines allocate their weights while ranks still copy their optimizer to the host only if that
    takes no more memory than the update (``rlmath.rollout.wake_room``). Otherwise engines wait, and
    there is no such phase.

    Args:
        phases: Phases from :func:`beside_sleeping_engine`.
        engine_bytes: All that an engine may take of a GPU.
        adapters: Adapters that the engine computes itself (``ActorShape.engine_adapters``).
    """
    sync = next(phase for phase in phases if phase.name == "weight sync")
    awake = {"engine weights": engine_weights_bytes(spec, engine_tp, step.quantized)}
    copying = [
        Phase("early wake-up", {**phase.terms, **awake})
        for phase in phases
        if phase.name == COPYING
    ]
    if adapters is None:
        awake["engine's buffers"] = engine_sync_bytes(spec, step.bucket_bytes, engine_tp)
    else:
        awake["engine's adapters"] = slot_bytes(spec, engine_tp, adapters)
        awake["engine's buffers"] = inbox_bytes(spec, step.bucket_bytes, adapters)
    update_bytes = max(
        phase.num_bytes
        for phase in phases
        if phase.name in ("logits", "training", "optimizer step")
    )
    wake_up = {"actor": resident_bytes(phases), "engine": engine_bytes}
    return [
        *(phase for phase in phases if phase.name not in ("state", "weight sync", COPYING)),
        *(one for one in copying if one.num_bytes <= update_bytes),
        Phase("weight sync", {**sync.terms, **awake}),
        Phase("wake-up", wake_up),
    ]


def engine_fixed_terms(
    spec: ModelSpec, tp: int, running: int, adapters: Lora | None = None, quantized: bool = False
) -> dict[str, float]:
    """Bytes that an engine takes of its share before any cache."""
    return {
        "process": ENGINE_PROCESS_GIB * GIB,
        "weights": engine_weights_bytes(spec, tp, quantized),
        **({} if adapters is None else {"adapters": slot_bytes(spec, tp, adapters)}),
        "a step": engine_step_bytes(spec, tp, running),
    }


def settings_phases(config: Config, spec: ModelSpec, gpu_gib: float) -> list[Phase]:
    """The phases of a run with these settings, on CUDA and colocated."""
    layout = resolve_layout(config, Device.cuda)
    actor, step = settings_in_plan(config, spec)
    engine_bytes = config.rollout.gpu_memory_utilization * gpu_gib * GIB
    phases = beside_sleeping_engine(spec, actor, step)
    tp, adapters = layout.engine_tensor_parallel, actor.engine_adapters
    return with_awake_engine(spec, phases, step, tp, engine_bytes, adapters)


def settings_cache_tokens(config: Config, spec: ModelSpec, gpu_gib: float) -> float:
    """Tokens that an engine's KV cache holds; below 0: not even the weights fit."""
    tp = config.rollout.tensor_parallel
    actor, step = settings_in_plan(config, spec)
    running = config.rollout.max_running_sequences
    fixed = engine_fixed_terms(spec, tp, running, actor.engine_adapters, step.quantized)
    room = config.rollout.gpu_memory_utilization * gpu_gib * GIB - sum(fixed.values())
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    in_fp8 = config.rollout.kv_cache_dtype is KvCacheDtype.fp8
    return room / kv_bytes(spec, tp, in_fp8, longest)


def settings_in_plan(config: Config, spec: ModelSpec) -> tuple[ActorShape, Step]:
    """The actor's layout and step of these settings on CUDA."""
    layout = resolve_layout(config, Device.cuda)
    settings, algorithm = config.actor, config.algorithm
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    per_stage = max(layout.actor.stage_sizes(spec.layers))
    recomputed = 0
    if settings.recompute.value == "full":
        recomputed = min(settings.recompute_num_layers or per_stage, per_stage)
    actor = ActorShape(
        layout.actor,
        recompute_layers=recomputed,
        max_tokens=max(settings.max_tokens_per_microbatch, longest),
        layers="local" if settings.layers.value == "local" else "transformer_engine",
        lora=adapters_of(settings.lora, spec, seed=0),
        unmerged=settings.lora.rollout is LoraRollout.unmerged,
        fp8=fp8_of(settings),
        recompute_modules=modules_of(settings, spec),
        overlap_gradients=settings.overlap_gradients,
        overlap_param_gather=settings.overlap_param_gather,
        max_forward_tokens=forward_tokens(settings, Device.cuda) or 0,
    )
    sequences = algorithm.prompts_per_step * algorithm.group_size
    minibatches = algorithm.minibatches_per_step * layout.actor.data_parallel
    step = Step(
        microbatches=max(1, sequences // minibatches),
        longest_tokens=longest,
        bucket_bytes=bucket_mib(config.weights.bucket_size_mib, 2 * spec.num_parameters) * MIB,
        reference=algorithm.kl_coef > 0,
        value_model=needs_value_model(algorithm.advantage),
        lm_head_float32=config.precision.lm_head_dtype.value == "float32",
        whole_logits=settings.logits.value == "whole",
        triton_logits=settings.logits.value == "triton",
        offload=settings.offload.value,
        offload_in_backward=settings.offload_in_backward,
        minibatches=algorithm.minibatches_per_step,
        quantized=config.rollout.quantization is not Quantization.none,
        replayed_tokens=(
            0
            if settings.routing_replay.value == "none"
            else -(-sequences // layout.actor.data_parallel) * longest
        ),
        sampled_routes=settings.routing_replay.value == "engine",
    )
    return actor, step
