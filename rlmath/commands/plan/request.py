"""Request of a plan, and the settings of ``rlmath train`` that stand for one of its layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlmath.checks import layout as check_layout
from rlmath.checks.fp8_training import fp8_model
from rlmath.checks.lora import lora_model
from rlmath.checks.pairs import pair_problems, unused_problems
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.time import Work, actor_time_s
from rlmath.config.actor import Fp8, Offload
from rlmath.config.arithmetic import RunLayout, resolve_layout
from rlmath.config.command_line import Given
from rlmath.config.load import load
from rlmath.config.quoting import override, path_override
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Config, Device, Placement
from rlmath.config.settings import out_of_range, replace_values
from rlmath.config.weights import bucket_mib
from rlmath.errors import ConfigError
from rlmath.model.spec import ModelSpec

if TYPE_CHECKING:
    from rlmath.commands.plan.layouts import Plan

# Printed with each layout, whether given or not: a later default changes nothing of a run.
PINNED = (
    "cluster.nodes",
    "cluster.gpus_per_node",
    "data.max_prompt_tokens",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.minibatches_per_step",
    "rollout.max_response_tokens",
)
# Defaults for tools: seconds of a call, and parallel calls (CPUs of a node).
CALL_S, PARALLEL_CALLS = 0.1, 64
# Given, and taken back where a layout has nothing to overlap.
OVERLAPS = ("actor.overlap_gradients", "actor.overlap_param_gather")


@dataclass(frozen=True)
class PlanRequest:
    """A model, GPUs, and settings, of which those that are given are not chosen."""

    path: str
    spec: ModelSpec
    gpu: Gpu
    given: Given
    mean_response_tokens: int  # Mean response; half of the longest unless it is asked for.
    efficiency: Efficiency = field(default_factory=Efficiency)
    calls: float = 0.0  # Mean calls of tools in a response.
    call_s: float = CALL_S  # Mean seconds of a call.

    @property
    def config(self) -> Config:
        return self.given.config

    @property
    def gpus(self) -> int:
        return self.config.cluster.nodes * self.gpus_per_node

    @property
    def gpus_per_node(self) -> int:
        return self.config.cluster.gpus_per_node

    @property
    def work(self) -> Work:
        algorithm = self.config.algorithm
        return Work(
            prompts=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            minibatches=algorithm.minibatches_per_step,
            prompt_tokens=self.config.data.max_prompt_tokens,
            response_tokens=self.config.rollout.max_response_tokens,
            mean_response_tokens=self.mean_response_tokens,
            calls=self.calls,
            call_s=self.call_s,
            parallel_calls=self.config.rollout.parallel_calls or PARALLEL_CALLS,
        )

    def actor_time_s(self, actor: ActorShape) -> tuple[float, float]:
        """Seconds of log-probs and of the update with a layout."""
        node = self.gpus_per_node
        return actor_time_s(self.spec, actor, self.work, self.gpu, self.efficiency, node)

    @property
    def offloads(self) -> bool:
        """Whether state of the actor leaves the GPU."""
        return self.given.get("actor.offload") not in (None, Offload.none)

    @property
    def quantized(self) -> bool:
        return self.config.rollout.quantization is not Quantization.none

    @property
    def kv_cache_in_fp8(self) -> bool:
        return self.config.rollout.kv_cache_dtype is KvCacheDtype.fp8

    def with_settings(self, values: Mapping[str, Any]) -> PlanRequest:
        """The same with other settings, as if they had been given; ``None``: one that is not."""
        return dataclasses.replace(self, given=self.given.replace(values))

    def layout_config(self, values: Mapping[str, Any]) -> Config:
        """The settings of a run with a layout, on CUDA and colocated."""
        config: Config = replace_values(
            self.config,
            {"cluster.placement": Placement.colocated, "cluster.device": Device.cuda, **values},
        )
        return config


def overrides(request: PlanRequest, plan: Plan) -> list[str]:
    """The settings of a plan, as ``rlmath train`` takes them, with those that were given."""
    config = request.config
    fp8 = request.quantized or request.kv_cache_in_fp8 or config.actor.fp8 is not Fp8.none
    needs_correction = fp8 and config.algorithm.correction.kind == "none"
    bucket = bucket_mib(config.weights.bucket_size_mib, 2 * request.spec.num_parameters)
    words = [
        path_override("model.path", request.path),
        "model.dtype=bfloat16",
        "cluster.device=cuda",
        "cluster.placement=colocated",
        *(["cluster.ray_address=auto"] if config.cluster.nodes > 1 else []),
        *(override(key, value) for key, value in plan.settings(config).items()),
        f"weights.bucket_size_mib={bucket}",
        *(["algorithm.correction.kind=token_truncate"] if needs_correction else []),
    ]
    # The model's path is the one that was found; of the rest the user's words count.
    own = {
        word.partition("=")[0]: word
        for word in request.given.words
        if not word.startswith(("cluster=", "model.path=", *OVERLAPS))
    }
    return [own.pop(word.partition("=")[0], word) for word in words] + list(own.values())


def check_settings(request: PlanRequest, words: list[str]) -> tuple[Config, RunLayout]:
    """Compose the settings and put them through the checks that need neither files nor GPUs. Raises
    ConfigError: ``rlmath train`` would refuse the settings."""
    config = load(["runner.run_dir=runs/plan", *words])
    problems = list(out_of_range(config))
    if problems:
        raise ConfigError.of(problems)
    layout, spec = resolve_layout(config, Device.cuda), request.spec
    problems += check_layout.model_splits(config, spec, "train")
    problems += check_layout.lengths(config, spec, "train")
    problems += check_layout.batch_divides(config, layout, "train")
    problems += check_layout.experts(config, spec, layout.actor)
    problems += lora_model(config, spec)
    problems += fp8_model(config, spec, layout.actor)
    problems += unused_problems(config)
    problems += pair_problems(config, Device.cuda, "train")
    if problems:
        raise ConfigError.of(problems)
    return config, layout
