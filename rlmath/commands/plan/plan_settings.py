"""The settings of ``rlmath train`` that a planned layout stands for, and their checks."""

from __future__ import annotations

from rlmath.checks import layout as check_layout
from rlmath.checks.algorithm import unused_problems
from rlmath.checks.fp8_training import fp8_model
from rlmath.checks.lora import lora_model
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.wish import Wish
from rlmath.config.actor import RoutingReplay
from rlmath.config.arithmetic import RunLayout, resolve_layout
from rlmath.config.load import load
from rlmath.config.quoting import path_override
from rlmath.config.schema import Config, Device
from rlmath.config.settings import out_of_range
from rlmath.errors import ConfigError
from rlmath.model.fp8_training import Fp8Training
from rlmath.model.lora import Lora


def overrides(wish: Wish, actor: ActorShape, engine_tp: int, share: float) -> list[str]:
    """The settings of a plan, as ``rlmath train`` takes them."""
    layout = actor.layout
    tp, pp, cp, ep = (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        layout.expert_parallel,
    )
    work = wish.work
    return [
        path_override("model.path", wish.path),
        "model.dtype=bfloat16",
        "cluster.device=cuda",
        f"cluster.nodes={wish.nodes}",
        f"cluster.gpus_per_node={min(wish.gpus, wish.gpus_per_node)}",
        "cluster.placement=colocated",
        *(["cluster.ray_address=auto"] if wish.nodes > 1 else []),
        f"data.max_prompt_tokens={work.prompt_tokens}",
        f"algorithm.prompts_per_step={work.prompts}",
        f"algorithm.group_size={work.group_size}",
        f"algorithm.minibatches_per_step={work.minibatches}",
        f"actor.tensor_parallel={tp}",
        f"actor.pipeline_parallel={pp}",
        *([f"actor.virtual_stages={wish.virtual_stages}"] if wish.virtual_stages > 1 else []),
        *([f"actor.context_parallel={cp}"] if cp > 1 else []),
        *([f"actor.expert_parallel={ep}"] if ep > 1 else []),
        f"actor.sequence_parallel={str(tp > 1).lower()}",
        *_recompute_settings(actor),
        *(["actor.overlap_gradients=true"] if actor.overlap_gradients else []),
        *(["actor.overlap_param_gather=true"] if actor.overlap_param_gather else []),
        f"actor.max_tokens_per_microbatch={wish.max_tokens or actor.max_tokens}",
        f"rollout.tensor_parallel={engine_tp}",
        f"rollout.max_response_tokens={work.response_tokens}",
        f"rollout.max_running_sequences={wish.max_running}",
        f"rollout.gpu_memory_utilization={share:g}",
        f"weights.bucket_size_mib={wish.bucket_size_mib}",
        *(["actor.layers=local"] if wish.layers == "local" else []),
        *(_fp8_settings(wish.fp8) if wish.fp8 else []),
        *(["actor.logits=whole"] if wish.whole_logits else []),
        *(["actor.logits=triton"] if wish.triton_logits else []),
        *([f"actor.offload={wish.offload}"] if wish.offload not in (None, "none") else []),
        *(["actor.offload_in_backward=true"] if wish.offload_in_backward else []),
        *_routing_settings(wish.routing_replay),
        *(_lora_settings(wish.lora) if wish.lora else []),
        *(["actor.lora.rollout=unmerged"] if wish.unmerged else []),
        *(["rollout.quantization=fp8"] if wish.quantized else []),
        *(["rollout.kv_cache_dtype=fp8"] if wish.kv_cache_in_fp8 else []),
        *(_CORRECTION if wish.quantized or wish.kv_cache_in_fp8 or wish.fp8 else []),
        *(["algorithm.kl_coef=0.001"] if wish.reference else []),
        *(["algorithm.advantage=gae"] if wish.value_model else []),
    ]


def _routing_settings(replay: RoutingReplay) -> list[str]:
    return [] if replay is RoutingReplay.none else [f"actor.routing_replay={replay.name}"]


def _fp8_settings(fp8: Fp8Training) -> list[str]:
    return [f"actor.fp8={fp8.format}", f"actor.fp8_recipe={fp8.recipe}"]


# FP8 needs a correction.
_CORRECTION = ("algorithm.correction.kind=token_truncate",)


def _recompute_settings(actor: ActorShape) -> list[str]:
    if actor.recompute_modules:
        return [
            "actor.recompute=selective",
            f"actor.recompute_modules=[{','.join(actor.recompute_modules)}]",
        ]
    layers = actor.recompute_layers
    return [
        f"actor.recompute={'full' if layers else 'none'}",
        f"actor.recompute_num_layers={layers or 'null'}",
    ]


def _lora_settings(lora: Lora) -> list[str]:
    layers = [] if lora.layers is None else [",".join(map(str, lora.layers))]
    return [
        f"actor.lora.rank={lora.rank}",
        f"actor.lora.alpha={lora.alpha:g}",
        f"actor.lora.targets=[{','.join(lora.targets)}]",
        *(f"actor.lora.layers=[{numbers}]" for numbers in layers),
    ]


def checked(wish: Wish, settings: list[str]) -> tuple[Config, RunLayout]:
    """Compose the settings and put them through the checks that need neither files nor GPUs.

    Raises:
        ConfigError: What ``rlmath train`` would say.
    """
    config = load([*settings, "runner.run_dir=runs/plan"])
    problems = list(out_of_range(config))
    if problems:
        raise ConfigError.of(problems)
    layout = resolve_layout(config, Device.cuda)
    problems += check_layout.model_splits(config, wish.spec, "train")
    problems += check_layout.lengths(config, wish.spec, "train")
    problems += check_layout.batch_divides(config, layout, "train")
    problems += check_layout.experts(config, wish.spec, layout)
    problems += lora_model(config, wish.spec)
    problems += fp8_model(config, wish.spec, layout.actor)
    problems += unused_problems(config)
    if problems:
        raise ConfigError.of(problems)
    return config, layout
