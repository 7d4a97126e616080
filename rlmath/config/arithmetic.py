"""Where a run's ranks, engines and sequences go, worked out from the settings alone.

Pure: nothing here looks at the machine or at a file. The text of :func:`describe` is printed at
the start of every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmath.algorithms.advantages import needs_value_model
from rlmath.algorithms.filters import EVERY_GROUP
from rlmath.config.schema import Config, Device, Placement
from rlmath.config.teacher import starts_teacher
from rlmath.errors import ConfigError
from rlmath.model.parallel import Layout


@dataclass(frozen=True)
class RunLayout:
    device: Device
    actor: Layout
    engines: int
    engine_tensor_parallel: int
    accelerators: int  # GPUs of the cluster; 0 on CPU.
    placement: Placement  # Whether engines and actor share GPUs; without meaning on CPU.
    teacher_engines: int = 0  # vLLM engines that have the teacher, on separate GPUs.
    teacher_tensor_parallel: int = 1

    @property
    def teacher_ranks(self) -> int:
        return self.teacher_engines * self.teacher_tensor_parallel

    @property
    def engine_ranks(self) -> int:
        return self.engines * self.engine_tensor_parallel


@dataclass(frozen=True)
class Batch:
    prompts: int
    samples: int
    minibatches: int
    data_parallel: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_tokens_per_microbatch: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def sequences_per_minibatch(self) -> int:
        return self.sequences // self.minibatches

    @property
    def sequences_per_rank(self) -> int:
        return self.sequences_per_minibatch // self.data_parallel

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def longest_sequences_per_microbatch(self) -> int:
        """How many sequences of the longest kind fit the token budget; at least 1."""
        return max(1, self.max_tokens_per_microbatch // self.max_sequence_tokens)

    @property
    def microbatches_of_longest(self) -> int:
        """Micro-batches of an optimizer step on a rank, when every sequence is at the limit."""
        return -(-self.sequences_per_rank // self.longest_sequences_per_microbatch)

    @property
    def max_tokens_per_step(self) -> int:
        return self.sequences * self.max_sequence_tokens

    def divides(self) -> bool:
        """Whether minibatches and ranks all get the same number of sequences."""
        return self.sequences % (self.minibatches * self.data_parallel) == 0


def resolve_layout(config: Config, device: Device) -> RunLayout:
    """Fill in settings that are left to the machine: data parallelism and number of engines. Raises
    ConfigError: the accelerators do not divide so, or are too few."""
    actor, rollout, cluster = config.actor, config.rollout, config.cluster
    teacher = config.teacher
    has_teacher = starts_teacher(teacher, config.algorithm.distill_coef)
    teacher_engines = teacher.engines if has_teacher else 0
    model_ranks = Layout(
        actor.tensor_parallel, actor.pipeline_parallel, context_parallel=actor.context_parallel
    ).world_size
    if device is Device.cpu:
        data_parallel = 1 if actor.data_parallel is None else actor.data_parallel
        engines = 1 if rollout.engines is None else rollout.engines
        accelerators = 0
    else:
        accelerators = cluster.nodes * cluster.gpus_per_node
        of_teacher = teacher_engines * teacher.tensor_parallel
        data_parallel, engines = _share_accelerators(config, accelerators, of_teacher, model_ranks)
    return RunLayout(
        device=device,
        actor=Layout(
            actor.tensor_parallel,
            actor.pipeline_parallel,
            data_parallel,
            context_parallel=actor.context_parallel,
            expert_parallel=actor.expert_parallel,
            pipeline_layers=tuple(actor.pipeline_layers or ()),
            virtual_stages=actor.virtual_stages,
        ),
        engines=engines,
        engine_tensor_parallel=rollout.tensor_parallel,
        accelerators=accelerators,
        placement=cluster.placement,
        teacher_engines=teacher_engines,
        teacher_tensor_parallel=teacher.tensor_parallel if has_teacher else 1,
    )


def _share_accelerators(
    config: Config, accelerators: int, of_teacher: int, model_ranks: int
) -> tuple[int, int]:
    """Data-parallel size and number of engines on ``accelerators`` GPUs, of which the teacher has
    some."""
    actor, rollout, cluster = config.actor, config.rollout, config.cluster
    separate = cluster.placement is Placement.separate
    there_are = f"{cluster.nodes} nodes x {cluster.gpus_per_node} GPUs = {accelerators} GPUs"
    if of_teacher:
        there_are += f" - {of_teacher} of the teacher = {accelerators - of_teacher} GPUs"
        accelerators -= of_teacher
    context = f" x context_parallel {actor.context_parallel}" if actor.context_parallel > 1 else ""
    one_copy = (
        f"tensor_parallel {actor.tensor_parallel} x pipeline_parallel "
        f"{actor.pipeline_parallel}{context} = {model_ranks} GPUs a copy"
    )
    if separate and actor.data_parallel is None and rollout.engines is None:
        raise ConfigError(
            f"cluster.placement=separate: {there_are} are to be divided between the actor "
            f"({one_copy}) and engines of {rollout.tensor_parallel} GPUs; give "
            "actor.data_parallel or rollout.engines"
        )
    for_actor = for_engines = accelerators
    if separate and rollout.engines is not None:
        for_actor = accelerators - rollout.engines * rollout.tensor_parallel
    data_parallel = actor.data_parallel
    if data_parallel is None:
        if for_actor < model_ranks or for_actor % model_ranks:
            fitting = [n for n in range(1, max(for_actor, 1) + 1) if for_actor % n == 0]
            raise ConfigError(
                f"actor.data_parallel: {for_actor} of {there_are} are the actor's, at {one_copy}: "
                f"{for_actor} / {model_ranks} is no whole number of copies; give "
                "actor.data_parallel, or make tensor_parallel x pipeline_parallel one of "
                f"{', '.join(map(str, fitting)) if for_actor > 0 else '(none: no GPU is left)'}"
            )
        data_parallel = for_actor // model_ranks
    actor_ranks = data_parallel * model_ranks
    if separate:
        for_engines = accelerators - actor_ranks
    engines = rollout.engines
    if engines is None:
        engines = for_engines // rollout.tensor_parallel
    used = actor_ranks + engines * rollout.tensor_parallel if separate else actor_ranks
    if used > accelerators or engines * rollout.tensor_parallel > accelerators or engines < 1:
        joined = "together" if separate else "each in turn"
        raise ConfigError(
            f"cluster: the actor wants {one_copy} x data_parallel {data_parallel} = {actor_ranks} "
            f"GPUs, the engines {engines} x tensor_parallel {rollout.tensor_parallel} = "
            f"{engines * rollout.tensor_parallel}, {joined} (placement "
            f"{cluster.placement.name}); there are {there_are}; use fewer of actor.data_parallel "
            "or rollout.engines, or more of cluster.nodes"
        )
    return data_parallel, engines


def batch_of(config: Config, layout: RunLayout) -> Batch:
    return Batch(
        prompts=config.algorithm.prompts_per_step,
        samples=config.algorithm.group_size,
        minibatches=config.algorithm.minibatches_per_step,
        data_parallel=layout.actor.data_parallel,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        max_tokens_per_microbatch=config.actor.max_tokens_per_microbatch,
    )


def teacher_sequence_tokens(config: Config) -> int:
    """Longest sequence of the teacher, in tokens: a prompt, a response, and the one token that vLLM
    samples after what it scores."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens + 1


def value_updates(config: Config) -> int:
    return config.runner.steps * config.algorithm.minibatches_per_step


def policy_updates(config: Config) -> int:
    """Optimizer steps of a whole run's policy, which begin when the value model has warmed up."""
    alone = config.value.warmup_steps if needs_value_model(config.algorithm.advantage) else 0
    return max(0, config.runner.steps - alone) * config.algorithm.minibatches_per_step


def describe(config: Config, layout: RunLayout) -> str:
    """The arithmetic of a training run, in a few lines for people."""
    batch, actor = batch_of(config, layout), layout.actor
    on_cpu = layout.device is Device.cpu
    where = (
        "on CPU" if on_cpu else f"on {_count(layout.accelerators, 'GPU')}, {layout.placement.name}"
    )
    optimizer_steps = policy_updates(config)
    return "\n".join(
        [
            f"batch    {batch.prompts:,} prompts x {batch.samples:,} samples = "
            f"{batch.sequences:,} sequences a step",
            *(
                f"         / {count:,} {parts} = {left:,} sequences {of}"
                for count, parts, left, of in (
                    (
                        batch.minibatches,
                        "minibatches",
                        batch.sequences_per_minibatch,
                        "an optimizer step",
                    ),
                    (
                        batch.data_parallel,
                        "data-parallel ranks",
                        batch.sequences_per_rank,
                        "a rank",
                    ),
                )
                if count > 1
            ),
            *_sampling(config, batch),
            f"tokens   at most {batch.max_prompt_tokens:,} prompt + "
            f"{batch.max_response_tokens:,} response = {batch.max_sequence_tokens:,} a sequence, "
            f"{batch.max_tokens_per_step:,} a step",
            f"         budget of {batch.max_tokens_per_microbatch:,} a micro-batch takes "
            f"{batch.longest_sequences_per_microbatch:,} of the longest: at most "
            f"{_count(batch.microbatches_of_longest, 'micro-batch', 'es')} a rank and optimizer "
            "step, if all are that long",
            f"actor    {_count(actor.world_size, 'rank')} {where}: tensor "
            f"{actor.tensor_parallel} x pipeline {actor.pipeline_parallel}"
            f"{f' of {actor.virtual_stages} chunks' if actor.virtual_stages > 1 else ''}"
            f"{f' x context {actor.context_parallel}' if actor.context_parallel > 1 else ''}"
            f" x data {actor.data_parallel}",
            f"engines  {layout.engines:,} x tensor {layout.engine_tensor_parallel}, "
            f"{batch.sequences / layout.engines:,.0f} sequences each on average, up to "
            f"{config.rollout.max_running_sequences:,} at once",
            *_teacher(config, layout),
            f"run      {config.runner.steps:,} steps = {optimizer_steps:,} optimizer steps, "
            f"{config.runner.steps * batch.sequences:,} sequences",
        ]
    )


def _teacher(config: Config, layout: RunLayout) -> list[str]:
    teacher = config.teacher
    if not config.algorithm.distill_coef:
        return []
    if teacher.url is not None:
        return [f"teacher  at {teacher.url}, up to {teacher.connections:,} sequences at once"]
    where = "" if layout.device is Device.cpu else " on separate GPUs"
    return [
        f"teacher  {teacher.path}: {layout.teacher_engines:,} engine(s) x tensor "
        f"{layout.teacher_tensor_parallel}{where}"
    ]


def _sampling(config: Config, batch: Batch) -> list[str]:
    """Requests of dynamic sampling, when groups may be dropped."""
    rules = config.algorithm.filter
    if rules.keep == EVERY_GROUP:
        return []
    at_first = math.ceil(batch.prompts * rules.oversample - 1e-9)
    return [
        f"sampling keeps groups by {rules.keep}: {at_first:,} prompts at first, at most "
        f"{batch.prompts:,} x {rules.max_rounds:,} rounds = {batch.prompts * rules.max_rounds:,} "
        "a step"
    ]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
