"""The settings that ranks are started with, from those of the run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.actor.model import ModelSettings
from rlmath.actor.settings import ActorSettings
from rlmath.algorithms.advantages import needs_value_model
from rlmath.config.arithmetic import RunLayout, policy_updates, value_updates
from rlmath.config.forward_tokens import forward_tokens
from rlmath.config.fp8_training import fp8_of
from rlmath.config.lora import adapters_of
from rlmath.config.precision import ProductDType
from rlmath.config.profile import PROFILE_FOLDER, ProfileTool
from rlmath.config.recompute import modules_of
from rlmath.config.schema import Config, Device, OptimizerConfig
from rlmath.config.shared_prompts import shares_prompts
from rlmath.model.precision import Precision
from rlmath.model.spec import read_model_spec
from rlmath.training.algorithm_settings import engines_in_fp8, reference_kind

if TYPE_CHECKING:
    import torch

# In the folder of a run.
LOGS = "logs"


def training_ranks(config: Config, layout: RunLayout) -> ActorSettings:
    settings = actor_settings(
        config, layout, config.actor.optimizer, policy_updates(config), config.rollout.temperature
    )
    settings = dataclasses.replace(
        settings,
        offload=config.actor.offload.value,
        offload_in_backward=config.actor.offload_in_backward,
        routing_replay=config.actor.routing_replay.value,
    )
    return dataclasses.replace(settings, value=value_model_settings(config, settings))


def fine_tuned_ranks(config: Config, layout: RunLayout) -> ActorSettings:
    return actor_settings(config, layout, config.sft.optimizer, config.sft.steps, 1.0)


def actor_settings(
    config: Config,
    layout: RunLayout,
    optimizer: OptimizerConfig,
    optimizer_steps: int,
    temperature: float,
) -> ActorSettings:
    """Parts that each Megatron rank builds. ``optimizer_steps``: steps of the whole run; default
    end of a decaying schedule. ``temperature``: at which log-probs are taken."""
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
        max_tokens_per_forward=forward_tokens(config.actor, layout.device),
        max_sequence_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        share_prompts=shares_prompts(
            config.actor.share_prompts, spec, layout.device.value, layout.actor.context_parallel
        ),
        reference=reference_kind(config),
        lora=adapters_of(config.actor.lora, spec, config.runner.seed),
        engines_in_fp8=engines_in_fp8(config),
    )


def value_model_settings(config: Config, policy: ActorSettings) -> ActorSettings | None:
    """The value model that the ranks build beside the policy; ``None``: the algorithm has none."""
    if not needs_value_model(config.algorithm.advantage):
        return None
    optimizer = whole_schedule(config.value.optimizer, value_updates(config))
    # Its weights are all trained: under LoRA it would be a copy of the base model with a head.
    return dataclasses.replace(policy, optimizer=optimizer, reference="none", lora=None)


def whole_schedule(optimizer: OptimizerConfig, optimizer_steps: int) -> OptimizerConfig:
    """The optimizer with a warm-up and a schedule that fit the run, unless they are set."""
    return dataclasses.replace(
        optimizer,
        warmup_steps=optimizer.warmup_of(optimizer_steps),
        decay_steps=optimizer.decay_steps or optimizer_steps,
    )


def precision(config: Config) -> Precision:
    """Precision that actor and engines share; a dense model has no router."""
    given = config.precision
    is_moe = read_model_spec(config.model.path).experts > 0
    router = given.router_dtype if is_moe else ProductDType.model
    return Precision(given.lm_head_dtype.value, router.value, given.batch_invariant)


def log_dir(config: Config) -> Path:
    """Where ranks and engines write their output."""
    return Path(config.runner.run_dir).absolute() / LOGS


def profile_folder(config: Config) -> Path:
    """Where ranks and engines write traces."""
    return Path(config.runner.run_dir).absolute() / PROFILE_FOLDER


def nsys_folder(config: Config) -> Path | None:
    """Where reports of Nsight Systems go; ``None``: ranks do not run under it."""
    profile = config.runner.profile
    uses_nsys = profile.steps and profile.tool is ProfileTool.nsys
    return profile_folder(config) if uses_nsys else None


def rank_threads(config: Config, layout: RunLayout) -> int | None:
    """Threads of each rank; ``None``: it takes its share of the cores beside its GPU."""
    if config.actor.num_threads is not None or layout.device is Device.cuda:
        return config.actor.num_threads
    return cpu_threads(layout.actor.world_size)


def cpu_threads(ranks: int) -> int:
    """Threads of each of ``ranks`` CPU processes, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def threads_per_rank(config: Config, layout: RunLayout) -> int:
    """Threads of one CPU operator in a rank."""
    return config.actor.num_threads or cpu_threads(layout.actor.world_size)
