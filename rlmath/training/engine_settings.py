"""How engines are set up, from the settings of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rlmath.cluster.placement import EnginePlace
from rlmath.config.actor import RoutingReplay
from rlmath.config.arithmetic import RunLayout, teacher_sequence_tokens
from rlmath.config.benchmarks import longest_response_tokens
from rlmath.config.engine_arguments import further_arguments
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.options import ENGINE_OPTIONS
from rlmath.config.precision import ProductDType
from rlmath.config.profile import ProfileTool
from rlmath.config.rollout import KvCacheDtype, Quantization, keeps_kv
from rlmath.config.schema import Config, Device, Placement
from rlmath.engines.profiling import EngineProfile
from rlmath.engines.requests import CPU_BLOCK_TOKENS, EngineSpec
from rlmath.engines.routes import RouteSpec
from rlmath.engines.transport import choose_transport
from rlmath.model.lora import Lora
from rlmath.model.precision import Precision
from rlmath.model.spec import read_model_spec
from rlmath.rollout.episodes import Episodes
from rlmath.rollout.pool import RolloutPool, Trainer
from rlmath.rollout.teacher import Teacher
from rlmath.rollout.teacher_server import ServerTeacher
from rlmath.rollout.weight_sync import Verification
from rlmath.training.rank_settings import log_dir, precision, profile_folder
from rlmath.weights.pieces import expert_tensors, hf_shapes
from rlmath.weights.slices import Rotation


def engine_spec(config: Config, layout: RunLayout, *, trains: bool) -> EngineSpec:
    """How each engine is set up; ``trains``: there is an actor, whose rollouts they sample."""
    rollout = config.rollout
    on_cuda = layout.device is Device.cuda
    colocated = layout.placement is Placement.colocated
    longest_response = longest_response_tokens(config, trains=trains)
    return EngineSpec(
        model_path=str(Path(config.model.path).absolute()),
        dtype=config.model.dtype.value,  # type: ignore[arg-type]
        device="cuda" if on_cuda else "cpu",
        tensor_parallel=layout.engine_tensor_parallel,
        max_sequence_tokens=config.data.max_prompt_tokens + longest_response,
        max_running_sequences=rollout.max_running_sequences,
        transport=choose_transport(
            config.weights.transport,
            device="cuda" if on_cuda else "cpu",
            colocated=colocated,
            options=config.weights.transport_options,
        ),
        log_dir=str(log_dir(config)),
        prefix_caching=rollout.prefix_caching and (on_cuda or _caches_on_cpu(config)),
        keeps_kv=keeps_kv(rollout),
        enforce_eager=rollout.enforce_eager,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_gib=rollout.cpu_kv_cache_gib,
        sleeps=on_cuda and colocated,
        max_batched_tokens=rollout.max_batched_tokens,
        async_scheduling=on_cuda if rollout.async_scheduling is None else rollout.async_scheduling,
        short_steps=not on_cuda if rollout.short_steps is None else rollout.short_steps,
        flashinfer=rollout.flashinfer,
        precision=precision(config),
        quantization=rollout.quantization,
        kv_cache_dtype=rollout.kv_cache_dtype,
        adapters=engine_adapters(config) if trains else None,
        routes=returned_routes(config) if trains else None,
        profile=engine_profile(config) if trains else None,
        arguments=further_arguments(
            rollout.engine_arguments, "cuda" if on_cuda else "cpu", ENGINE_OPTIONS.of_chosen(config)
        ),
    )


def _caches_on_cpu(config: Config) -> bool:
    """Whether a CPU engine can keep prefixes. Of prompts without a whole block there is nothing to
    keep, and looking costs time; states of linear attention are kept with chunked prefill alone."""
    if not keeps_kv(config.rollout) and config.data.max_prompt_tokens < CPU_BLOCK_TOKENS:
        return False
    return read_model_spec(config.model.path).linear is None


def engine_profile(config: Config) -> EngineProfile | None:
    """How engines are profiled; ``None``: no step is, or only the ranks are."""
    profile = config.runner.profile
    if not profile.steps or profile.tool is ProfileTool.memory:
        return None
    return EngineProfile(profile.tool, profile_folder(config))


def engines_have_to_read(config: Config, *, resumes: bool) -> bool:
    """Whether engines have to read the model's weights before a run, or its ranks send them all.

    Ranks send them at a resume anyway. On several nodes they do it at every start, or each engine
    would read the whole model from the nodes' shared disk. Engines that quantize, or that get
    adapters alone, read the base model. A new run on one node has them read the files,
    which its ranks have just brought into memory: so its first step compares the ranks' model with
    vLLM's own reading, and not with their export.
    """
    rollout, lora = config.rollout, config.actor.lora
    if rollout.quantization is not Quantization.none or lora.rollout is not LoraRollout.merged:
        return True
    if rollout.kv_cache_dtype is not KvCacheDtype.auto:
        return True
    return not (resumes or lora.init_from is not None or config.cluster.nodes > 1)


def returned_routes(config: Config) -> RouteSpec | None:
    """Routes of an MoE that engines return with the samples; ``None``: none."""
    if config.actor.routing_replay is not RoutingReplay.engine:
        return None
    return RouteSpec.of(read_model_spec(config.model.path))


def engine_adapters(config: Config) -> Lora | None:
    """Adapters that engines compute; ``None``: weight syncs bring all weights."""
    lora = config.actor.lora
    if lora.rollout is LoraRollout.merged:
        return None
    return adapters_of(lora, read_model_spec(config.model.path), config.runner.seed)


def pool_of(
    config: Config,
    spec: EngineSpec,
    num_engines: int,
    places: Sequence[EnginePlace] | None,
    trainer: Trainer | None = None,
    episodes: Episodes | None = None,
) -> RolloutPool:
    """Engines as the settings have them, not started."""
    return RolloutPool(
        spec,
        num_engines=num_engines,
        stall_timeout_s=config.rollout.stall_timeout_s,
        max_restarts=config.rollout.max_engine_restarts,
        places=places,
        trainer=trainer,
        episodes=episodes,
    )


def teacher_spec(config: Config, layout: RunLayout) -> EngineSpec:
    """How each engine of the teacher is set up: to read whole sequences, and to keep nothing."""
    teacher, like = config.teacher, engine_spec(config, layout, trains=True)
    path = teacher_path(config)
    is_moe = read_model_spec(path).experts > 0
    given = config.precision
    router = given.router_dtype if is_moe else ProductDType.model
    return dataclasses.replace(
        like,
        role="teacher",
        model_path=path,
        dtype=(teacher.dtype or config.model.dtype).value,
        tensor_parallel=layout.teacher_tensor_parallel,
        max_sequence_tokens=teacher_sequence_tokens(config),
        prefix_caching=False,
        keeps_kv=False,
        gpu_memory_utilization=teacher.gpu_memory_utilization,
        cpu_kv_cache_gib=teacher.cpu_kv_cache_gib,
        max_batched_tokens=teacher.max_batched_tokens,
        enforce_eager=True,
        sleeps=False,
        async_scheduling=False,
        adapters=None,
        routes=None,
        profile=None,
        quantization=Quantization.none,
        kv_cache_dtype=KvCacheDtype.auto,
        precision=Precision(given.lm_head_dtype.value, router.value, given.batch_invariant),
    )


def teacher_path(config: Config) -> str:
    """The teacher's folder, which the checks have asked for."""
    assert config.teacher.path is not None
    return str(Path(config.teacher.path).absolute())


def server_teacher(config: Config) -> Teacher | None:
    """The teacher on a server; ``None``: it is on engines of the run."""
    teacher = config.teacher
    if teacher.url is None:
        return None
    return ServerTeacher(
        teacher.url,
        teacher.served_model,
        sequence_tokens=teacher_sequence_tokens(config),
        connections=teacher.connections,
        timeout_s=teacher.timeout_s,
        attempts=teacher.attempts,
    )


def verification_of(config: Config, layout: RunLayout) -> Verification:
    """When engines' weights are compared, and in which slices."""
    every = config.weights.verify_every
    if every is not None:
        return Verification(every)
    spec = read_model_spec(config.model.path)
    packed = layout.device is Device.cpu and config.rollout.quantization is Quantization.none
    whole = frozenset(expert_tensors(spec))
    return Verification(None, Rotation(hf_shapes(spec), packed=packed, whole=whole))
