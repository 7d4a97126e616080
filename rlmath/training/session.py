"""The parts of a run, made from the settings, started side by side and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.actor.group import ActorGroup
from rlmath.actor.model import ModelSettings
from rlmath.actor.settings import ActorSettings, ReferenceSettings
from rlmath.algorithms.advantages import needs_value_model
from rlmath.cluster.grading_nodes import node_workers
from rlmath.cluster.nodes import refuse_idle_gpus
from rlmath.cluster.placement import EnginePlace, placed
from rlmath.cluster.session import ray_session
from rlmath.cluster.watchdog import WatchedComponent
from rlmath.config.actor import Offload, RoutingReplay
from rlmath.config.arithmetic import (
    RunLayout,
    policy_updates,
    resolve_layout,
    teacher_sequence_tokens,
    value_updates,
)
from rlmath.config.benchmarks import longest_response_tokens
from rlmath.config.fp8_training import fp8_of
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.precision import ProductDType
from rlmath.config.recompute import modules_of
from rlmath.config.reward import RewardConfig, WorkersOn
from rlmath.config.rollout import KvCacheDtype, Quantization, keeps_kv
from rlmath.config.schema import Config, Device, OnRewardError, OptimizerConfig, Placement
from rlmath.config.shared_prompts import shares_prompts
from rlmath.device import choose_platform
from rlmath.device.residue import check_engine_room
from rlmath.grading import MathGrader
from rlmath.grading.settings import workers_for
from rlmath.model.folder import TINY
from rlmath.model.lora import Lora
from rlmath.model.precision import Precision
from rlmath.model.spec import read_model_spec
from rlmath.monitor import Monitor
from rlmath.monitor.startup import Say, StartLog
from rlmath.rewards.mix import RewardMix
from rlmath.rollout import watchdog_probes as waiting
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool, Trainer
from rlmath.rollout.requests import CPU_BLOCK_TOKENS, EngineSpec
from rlmath.rollout.routes import RouteSpec
from rlmath.rollout.sampling import Sampling
from rlmath.rollout.teacher import EngineTeacher, Teacher, TeacherScores
from rlmath.rollout.teacher_server import ServerTeacher
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import Verification
from rlmath.training.algorithm_settings import reference_settings
from rlmath.training.checks.catalog import step_checks
from rlmath.training.gate import engines_in_fp8
from rlmath.training.trainer import ActorTrainer
from rlmath.types import Problem
from rlmath.weights.pieces import expert_tensors, hf_shapes
from rlmath.weights.slices import Rotation
from rlmath.weights.transport import choose_transport

if TYPE_CHECKING:
    import torch

# Of the run's folder.
LOGS = "logs"


class Session:
    """What a loop works with. Made by :func:`open_session`.

    Attributes:
        config: With the model's path resolved.
        layout: Ranks and engines.
        verification: After which weight syncs the engines' weights are compared with the actor's.
        checks: Of every step.
        wake_room: Decides whether engines wake while ranks copy their state to the host.
        teacher: Scores what is sampled; ``None``: there is none.
    """

    def __init__(
        self,
        config: Config,
        layout: RunLayout,
        actor: ActorGroup | None,
        sampling: Sampling | None,
        teacher: TeacherScores | None = None,
    ) -> None:
        self.config, self.layout = config, layout
        self._actor, self._sampling = actor, sampling
        self.teacher = teacher
        self.verification = verification_of(config, layout)
        self.checks = step_checks()
        self.wake_room = WakeRoom()

    @property
    def actor(self) -> ActorGroup:
        """The Megatron ranks; the session was opened with an optimizer."""
        assert self._actor is not None, "this session was opened without an optimizer"
        return self._actor

    @property
    def sampling(self) -> Sampling:
        """Engines and rewards; the session was opened with ``samples``."""
        assert self._sampling is not None, "this session was opened without engines"
        return self._sampling

    @property
    def threads_per_rank(self) -> int:
        """Threads of one CPU operator in a rank."""
        return self.config.actor.num_threads or cpu_threads(self.layout.actor.world_size)

    def leave_gpus_to_ranks(self) -> None:
        """End engines on the ranks' GPUs if the ranks' weights were moved out for them: both do not
        fit. Nothing can be sampled after it."""
        offloads = self.config.actor.offload is Offload.all
        if self._sampling is not None and self._sampling.pool.spec.sleeps and offloads:
            self._sampling.pool.shutdown()

    def watchdog_probes(self, monitor: Monitor) -> list[WatchedComponent]:
        """What a run can wait for, for the watchdog."""
        parts = [
            WatchedComponent(
                lambda: monitor.phase.changes, lambda: [f"the phase {monitor.phase.name}"]
            ),
            self.actor.watchdog_probe(),
        ]
        if self._sampling is not None:
            parts.append(waiting.engines(self._sampling.pool))
            parts.append(waiting.grades(self._sampling.collector))
        if self.teacher is not None:
            parts.append(self.teacher.teacher.watchdog_probe())
        return parts


@contextlib.contextmanager
def open_session(
    config: Config,
    *,
    optimizer: OptimizerConfig | None,
    optimizer_steps: int = 1,
    temperature: float = 1.0,
    samples: bool = True,
    for_training: bool = False,
    problems: Iterable[Problem] = (),
    engines_read: bool = True,
) -> Iterator[Session]:
    """Start what a loop needs; see ``start`` for the order.

    Args:
        config: Checked settings.
        optimizer: Of the actor; ``None``: no actor.
        optimizer_steps: Of the whole run, where a decaying schedule ends if the settings leave it
            open.
        temperature: At which the actor takes log-probs.
        samples: Whether engines and rewards are wanted.
        for_training: Whether the actor does the updates of reinforcement learning, with the value
            model and the routing replay of the settings.
        problems: That will be sampled: the rewards' parameters are checked against their columns.
        engines_read: Engines read the model's weights; else the caller sends them all before they
            sample.

    Raises:
        UserError: The model, the cluster or the machine does not allow it.
    """
    config = with_model_folder(config)
    # Without an optimizer there is no actor, whose layers would matter.
    layers = "any" if optimizer is None else config.actor.layers.value
    joins = config.cluster.ray_address is not None
    platform = choose_platform(config.cluster.device.value, layers, elsewhere=joins)
    platform.prepare_driver()
    device = Device(platform.name)
    layout = resolve_layout(config, device)
    say = StartLog(Path(config.runner.run_dir) / LOGS)
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(reward_mix(config)) if samples else None
        if rewards is not None:
            rewards.check_columns(problems)
            rewards.probe()
        distills = samples and for_training and config.algorithm.distill_coef > 0
        teacher = server_teacher(config) if distills else None
        if teacher is not None:
            teacher.probe()
        if not distills:  # There is nothing to score.
            layout = dataclasses.replace(layout, teacher_engines=0)
        say("starting Ray")
        stack.enter_context(ray_session(config.cluster))
        if joins and device is Device.cpu and config.cluster.device is Device.auto:
            refuse_idle_gpus()
        places = stack.enter_context(placed(layout, config.cluster.nodes))
        spec = None
        if samples:
            spec = engine_spec(config, layout, trains=optimizer is not None)
            spec = dataclasses.replace(spec, reads_weights=engines_read)
            if device is Device.cuda:
                whose = "FlashInfer's" if spec.flashinfer else "vLLM's own"
                say(f"engines use {whose} kernels (rollout.flashinfer={spec.flashinfer})")
        actor = trainer = pool = teacher_pool = None
        if optimizer is not None:
            settings = actor_settings(config, layout, optimizer, optimizer_steps, temperature)
            if samples:  # Without engines there is nothing to make room for.
                settings = dataclasses.replace(
                    settings,
                    offload=config.actor.offload.value,
                    offload_in_backward=config.actor.offload_in_backward,
                )
            if for_training:
                replay = config.actor.routing_replay.value
                settings = dataclasses.replace(settings, routing_replay=replay)
                value = value_model_settings(config, settings)
                settings = dataclasses.replace(settings, value=value)
            actor = ActorGroup(
                settings,
                layout.actor,
                device=device.value,
                seed=config.runner.seed,
                num_threads=rank_threads(config, layout),
                log_dir=str(log_dir(config)),
                actor_options=places.actor_ranks,
                shares_gpus=spec is not None and spec.sleeps,
            )
            if spec is not None:
                trainer = ActorTrainer(config, spec, actor)
        if spec is not None:
            pool = pool_of(config, spec, layout.engines, places.engines, trainer)
            stack.callback(pool.shutdown)
        if layout.teacher_engines:
            teachers = layout.teacher_engines
            teacher_pool = pool_of(config, teacher_spec(config, layout), teachers, places.teachers)
            stack.callback(teacher_pool.shutdown)
            teacher_pool.launch()
        if actor is not None:
            stack.callback(actor.shutdown)
        start(actor, pool, say)
        if teacher_pool is not None:
            say("waiting for the teacher's engines")
            teacher_pool.wait_until_ready()
            teacher = EngineTeacher(teacher_pool, read_model_spec(teacher_path(config)).vocab)
        sampling = None
        if pool is not None and rewards is not None:
            if actor is not None:
                say("sending the weights from the ranks to the engines")
                pool.connect()
            if config.reward.workers_on is WorkersOn.engines and rewards.grader is not None:
                say("starting the grading workers on the engines' nodes")
                grade_there(rewards.grader, pool.engines, config.reward, stack)
            collector = Collector(rewards)
            stack.callback(collector.close)
            sampling = Sampling(pool, rewards, collector)
        say("ready")
        scores = None
        if teacher is not None:
            stack.callback(teacher.close)
            scores = TeacherScores(teacher)
        session = Session(config, layout, actor, sampling, scores)
        stack.callback(lambda: session.checks.close())
        yield session


def pool_of(
    config: Config,
    spec: EngineSpec,
    num_engines: int,
    places: Sequence[EnginePlace] | None,
    trainer: Trainer | None = None,
) -> RolloutPool:
    """Engines as the settings have them, not started."""
    return RolloutPool(
        spec,
        num_engines=num_engines,
        stall_timeout_s=config.rollout.stall_timeout_s,
        max_restarts=config.rollout.max_engine_restarts,
        places=places,
        trainer=trainer,
    )


def open_training(
    config: Config,
    *,
    samples: bool = True,
    problems: Iterable[Problem] = (),
    engines_read: bool = True,
) -> contextlib.AbstractContextManager[Session]:
    """What reinforcement learning needs; without ``samples`` its updates alone. See
    :func:`open_session`."""
    return open_session(
        config,
        optimizer=config.actor.optimizer,
        optimizer_steps=policy_updates(config),
        temperature=config.rollout.temperature,
        samples=samples,
        for_training=True,
        problems=problems,
        engines_read=engines_read,
    )


def start(actor: ActorGroup | None, pool: RolloutPool | None, say: Say) -> None:
    """Start ranks and engines, side by side unless they share GPUs.

    vLLM sizes its KV cache by the GPU's free memory before and after a trial run, and its check at
    the start asks for all of ``rollout.gpu_memory_utilization`` to be free. Both mean something
    only while the ranks on that GPU hold what they hold for good and allocate nothing: engines on
    the ranks' GPUs start when all ranks are ready and have given back memory that they do not use.
    What needs no GPU, their processes and imports, they do meanwhile: ten seconds and more.
    A GPU has one engine, so no two measure at once.

    Raises:
        UserError: The model cannot be built or read, the ranks and their communicators leave too
            little of a GPU, or an engine cannot start.
        ActorError: A rank failed in another way.
    """
    engines = "" if pool is None else "the vLLM engines"
    ranks = "" if actor is None else "the Megatron ranks with model and weights"
    if actor is None or pool is None or not pool.spec.sleeps:
        say("starting " + " and ".join(one for one in (engines, ranks) if one), logs=True)
        if pool is not None:
            pool.launch()
        if actor is not None:
            actor.launch()
            actor.wait_until_ready(say)
            if pool is not None:
                say("the ranks are ready; waiting for the engines")
    else:
        say(f"starting {ranks}", logs=True)
        pool.prepare()
        actor.launch()
        actor.wait_until_ready(say)
        actor.release_cached_memory()
        check_engine_room(actor.residues(), pool.spec.gpu_memory_utilization)
        say(f"the ranks are ready; starting {engines}")
        pool.launch()
    if pool is not None:
        pool.wait_until_ready()


def with_model_folder(config: Config) -> Config:
    """The settings with ``model.path=tiny`` replaced by the folder of a tiny model made for it."""
    if config.model.path != TINY:
        return config
    from rlmath.model.tiny import make_tiny_model

    folder = Path(config.runner.run_dir) / "model"
    if not (folder / "config.json").exists():
        make_tiny_model(folder, seed=config.runner.seed)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def verification_of(config: Config, layout: RunLayout) -> Verification:
    """When engines' weights are compared, and in which slices."""
    every = config.weights.verify_every
    if every is not None:
        return Verification(every)
    spec = read_model_spec(config.model.path)
    packed = layout.device is Device.cpu and config.rollout.quantization is Quantization.none
    whole = frozenset(expert_tensors(spec))
    return Verification(None, Rotation(hf_shapes(spec), packed=packed, whole=whole))


def precision(config: Config) -> Precision:
    """What actor and engines keep alike; a dense model has no router."""
    given = config.precision
    is_moe = read_model_spec(config.model.path).experts > 0
    router = given.router_dtype if is_moe else ProductDType.model
    return Precision(given.lm_head_dtype.value, router.value, given.batch_invariant)


def log_dir(config: Config) -> Path:
    """Where ranks and engines write their output."""
    return Path(config.runner.run_dir).absolute() / LOGS


def rank_threads(config: Config, layout: RunLayout) -> int | None:
    """Threads of each rank; ``None``: it takes its share of the cores beside its GPU."""
    if config.actor.num_threads is not None or layout.device is Device.cuda:
        return config.actor.num_threads
    return cpu_threads(layout.actor.world_size)


def cpu_threads(ranks: int) -> int:
    """Threads of each of ``ranks`` CPU processes, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@contextlib.contextmanager
def reward_mix(config: Config) -> Iterator[RewardMix]:
    """The rewards that ``reward`` describes, with the grader that they share.

    Now and then the grader has SymPy check what its fast layers decided; where the two disagree,
    ``run_dir/grading_disagreements.jsonl`` says so.
    """
    reward = config.reward
    grader = MathGrader(
        reward.num_workers or workers_for(len(os.sched_getaffinity(0))),
        reward.timeout_s,
        fallback=reward.fallback.value,
        disagreement_path=str(Path(config.runner.run_dir) / "grading_disagreements.jsonl"),
    )
    with (
        contextlib.closing(grader),
        RewardMix.from_config(
            reward.items,
            correct=reward.correct,
            incorrect=reward.incorrect,
            grader=grader,
            on_error="raise" if reward.on_error is OnRewardError.stop else "none",
            # A reward written for TRL gets message lists when the prompts are chats, as there.
            completion_format="chat" if config.data.apply_chat_template else "text",
        ) as mix,
    ):
        yield mix


def grade_there(
    grader: MathGrader, engines: Sequence[Any], reward: RewardConfig, stack: contextlib.ExitStack
) -> None:
    """Give the grader workers on the nodes of these engines, until the stack's end."""
    workers = node_workers(grader.settings, engines, reward.num_workers)
    stack.callback(workers.close)
    grader.use_workers(workers)


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
            config.weights.transport.value,
            device="cuda" if on_cuda else "cpu",
            colocated=colocated,
        ),
        log_dir=str(log_dir(config)),
        # Of prompts without a whole block there is nothing to keep, and looking costs time.
        prefix_caching=rollout.prefix_caching
        and (on_cuda or keeps_kv(rollout) or config.data.max_prompt_tokens >= CPU_BLOCK_TOKENS),
        keeps_kv=keeps_kv(rollout),
        enforce_eager=rollout.enforce_eager,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_gib=rollout.cpu_kv_cache_gib,
        sleeps=on_cuda and colocated,
        max_batched_tokens=rollout.max_batched_tokens,
        async_scheduling=on_cuda if rollout.async_scheduling is None else rollout.async_scheduling,
        flashinfer=rollout.flashinfer,
        precision=precision(config),
        quantization=rollout.quantization,
        kv_cache_dtype=rollout.kv_cache_dtype,
        adapters=engine_adapters(config) if trains else None,
        routes=returned_routes(config) if trains else None,
    )


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
    """What of an MoE's routes engines return with the samples; ``None``: nothing."""
    if config.actor.routing_replay is not RoutingReplay.engine:
        return None
    return RouteSpec.of(read_model_spec(config.model.path))


def engine_adapters(config: Config) -> Lora | None:
    """What engines compute beside the base model; ``None``: weight syncs bring all weights."""
    lora = config.actor.lora
    if lora.rollout is LoraRollout.merged:
        return None
    return adapters_of(lora, read_model_spec(config.model.path), config.runner.seed)


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


def whole_schedule(optimizer: OptimizerConfig, optimizer_steps: int) -> OptimizerConfig:
    """The optimizer with a warm-up and a schedule that fit the run, unless the settings say."""
    return dataclasses.replace(
        optimizer,
        warmup_steps=optimizer.warmup_of(optimizer_steps),
        decay_steps=optimizer.decay_steps or optimizer_steps,
    )


def actor_settings(
    config: Config,
    layout: RunLayout,
    optimizer: OptimizerConfig,
    optimizer_steps: int,
    temperature: float,
) -> ActorSettings:
    """What each Megatron rank builds."""
    import torch

    dtype: torch.dtype = getattr(torch, config.model.dtype.value)
    spec = read_model_spec(config.model.path)
    return ActorSettings(
        model_path=str(Path(config.model.path).absolute()),
        model=ModelSettings(
            dtype=dtype,
            sequence_parallel=config.actor.sequence_parallel,
            recompute=config.actor.recompute.value,
            recompute_num_layers=config.actor.recompute_num_layers,
            recompute_modules=modules_of(config.actor, spec),
            precision=precision(config),
            layers=config.actor.layers.value,
            logits=config.actor.logits.value,
            fp8=fp8_of(config.actor),
        ),
        optimizer=whole_schedule(optimizer, optimizer_steps),
        distributed_optimizer=config.actor.distributed_optimizer,
        overlap_gradients=config.actor.overlap_gradients,
        overlap_param_gather=config.actor.overlap_param_gather,
        temperature=temperature,
        max_tokens_per_microbatch=config.actor.max_tokens_per_microbatch,
        max_sequence_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        share_prompts=shares_prompts(
            config.actor.share_prompts, spec, layout.device.value, layout.actor.context_parallel
        ),
        reference=reference_settings(config),
        lora=adapters_of(config.actor.lora, spec, config.runner.seed),
        engines_in_fp8=engines_in_fp8(config),
    )


def value_model_settings(config: Config, policy: ActorSettings) -> ActorSettings | None:
    """The value model that the ranks build beside the policy; ``None``: the algorithm has none."""
    if not needs_value_model(config.algorithm.advantage):
        return None
    optimizer = whole_schedule(config.value.optimizer, value_updates(config))
    # Its weights are all trained: under LoRA it would be a copy of the base model with a head.
    return dataclasses.replace(
        policy, optimizer=optimizer, reference=ReferenceSettings(), lora=None
    )
