"""``rlmath plan layout``: which layouts fit, with the arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rlmath.algorithms.advantages import needs_value_model
from rlmath.checks.lora import lora_model, lora_problems, unmerged_model, unmerged_problems
from rlmath.checks.quantization import quantization_model, quantization_problems
from rlmath.checks.recompute import recompute_model, recompute_problems
from rlmath.checks.routing import routing_model, routing_problems
from rlmath.commands.plan.advice import plans_or_advice
from rlmath.commands.plan.arguments import no_model_argument, positive, share
from rlmath.commands.plan.experiment import train_command, write_experiment
from rlmath.commands.plan.gpus import GPUS, Efficiency, Gpu, gpu_named
from rlmath.commands.plan.models import SHAPE_FLAGS, read_plan_model
from rlmath.commands.plan.plan_settings import checked, overrides
from rlmath.commands.plan.report import as_json, as_text
from rlmath.commands.plan.time import Work
from rlmath.commands.plan.wish import Wish
from rlmath.config.actor import RoutingReplay
from rlmath.config.arithmetic import describe
from rlmath.config.command_line import Given, count
from rlmath.config.fp8_training import fp8_of
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.recompute import modules_of
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Config, Device, Layers, Logits, Recompute
from rlmath.errors import ConfigError, UserError
from rlmath.model.fp8_training import Fp8Training, capability_problem
from rlmath.model.lora import Lora
from rlmath.model.spec import ModelSpec

# What a plan of layouts depends on. A setting of a layout that is not given is chosen.
SETTINGS = (
    "model.path",
    "cluster",
    "cluster.nodes",
    "cluster.gpus_per_node",
    "data.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.max_running_sequences",
    "rollout.tensor_parallel",
    "rollout.quantization",
    "rollout.kv_cache_dtype",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "algorithm.minibatches_per_step",
    "algorithm.kl_coef",
    "algorithm.advantage",
    "actor.tensor_parallel",
    "actor.pipeline_parallel",
    "actor.virtual_stages",
    "actor.context_parallel",
    "actor.expert_parallel",
    "actor.max_tokens_per_microbatch",
    "actor.recompute",
    "actor.recompute_num_layers",
    "actor.recompute_modules",
    "actor.overlap_gradients",
    "actor.overlap_param_gather",
    "actor.layers",
    "actor.fp8",
    "actor.fp8_recipe",
    "actor.logits",
    "actor.offload",
    "actor.offload_in_backward",
    "actor.routing_replay",
    "actor.lora.rank",
    "actor.lora.alpha",
    "actor.lora.targets",
    "actor.lora.layers",
    "actor.lora.rollout",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command besides its settings."""
    add = parser.add_argument
    add("model", nargs="?", help=argparse.SUPPRESS)
    for flag, field in SHAPE_FLAGS.items():
        add(flag, type=count, metavar="N", help=f"instead of a model: {field}")
    add("--head-dim", type=count, metavar="N", help="width of a head (default: hidden / heads)")
    add(
        "--tied", action="store_true", help="tied embeddings: the output layer shares the embedding"
    )
    add("--architecture", default="Qwen2ForCausalLM", help="for sizes given instead of a model")
    add("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (default: h100)")
    add("--gpu-gib", type=positive, metavar="GIB", help="GPU memory (default: the card's)")
    add(
        "--mean-response-tokens",
        type=count,
        metavar="N",
        help="mean response (default: half of the longest)",
    )
    add("--mfu", type=share, help="fraction of peak FLOPs that the actor reaches")
    add("--decode-bandwidth", type=share, help="fraction of memory bandwidth that sampling reaches")
    add("--top", type=count, default=8, metavar="N", help="number of layouts to show")
    add("--json", action="store_true", help="print every layout with every term as JSON")
    add(
        "--command",
        action="store_true",
        help="print only the rlmath train command of the first layout",
    )
    add("--write", metavar="NAME", help="write the first layout as experiment=NAME")
    add("--config-dir", type=Path, metavar="DIR", help="folder to write the experiment to")


def run(arguments: argparse.Namespace, given: Given) -> int:
    """Print the layouts that fit.

    Raises:
        UserError: None does, or the question makes no sense.
    """
    wish, plans = plans_or_advice(wish_of(arguments, given))
    best = plans[0]
    wish = dataclasses.replace(wish, max_running=best.max_running)
    settings = overrides(wish, best.actor, best.engine_tp, best.engine_share)
    config, layout = checked(wish, settings)
    if arguments.json:
        print(json.dumps(as_json(wish, plans), indent=1))
    elif arguments.command:
        print(train_command(wish, settings, given))
    else:
        print(as_text(wish, plans, arguments.top, describe(config, layout)))
    if arguments.write:
        file = write_experiment(wish, settings, given, arguments.write, arguments.config_dir)
        where = f"--config-dir {arguments.config_dir} " if arguments.config_dir else ""
        print(f"\nwritten: {file}\n  rlmath train {where}experiment={arguments.write} --check")
    return 0


def wish_of(arguments: argparse.Namespace, given: Given) -> Wish:
    """What settings and options ask for.

    Raises:
        UserError: There is no such model, or a length is larger than what holds it.
    """
    config = given.config
    no_model_argument(arguments.model)
    path, spec = read_plan_model(arguments, given.get("model.path"))
    gpu = gpu_named(arguments.gpu)
    if arguments.gpu_gib is not None:
        gpu = dataclasses.replace(gpu, memory_gib=arguments.gpu_gib)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    mean = arguments.mean_response_tokens or max(1, response // 2)
    if mean > response:
        raise UserError(
            f"--mean-response-tokens {mean}: is more than rollout.max_response_tokens={response}, "
            "the longest"
        )
    longest = prompt + response
    if longest > spec.max_positions:
        raise UserError(
            f"rollout.max_response_tokens={response}: {prompt} prompt + {response} response = "
            f"{longest} tokens, but the model has {spec.max_positions} positions; use "
            f"{spec.max_positions - prompt} or less"
        )
    shares = {"mfu": arguments.mfu, "decode_bandwidth": arguments.decode_bandwidth}
    algorithm = config.algorithm
    return Wish(
        path=path,
        spec=spec,
        gpu=gpu,
        gpus=config.cluster.nodes * config.cluster.gpus_per_node,
        gpus_per_node=config.cluster.gpus_per_node,
        work=Work(
            prompts=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            minibatches=algorithm.minibatches_per_step,
            prompt_tokens=prompt,
            response_tokens=response,
            mean_response_tokens=mean,
        ),
        max_tokens=given.get("actor.max_tokens_per_microbatch"),
        max_running=given.get("rollout.max_running_sequences"),
        efficiency=Efficiency(**{name: value for name, value in shares.items() if value}),
        tp=given.get("actor.tensor_parallel"),
        pp=given.get("actor.pipeline_parallel"),
        cp=given.get("actor.context_parallel"),
        ep=given.get("actor.expert_parallel"),
        engine_tp=given.get("rollout.tensor_parallel"),
        recompute_layers=_recomputed(given),
        recompute_modules=_modules(config, spec),
        overlap_gradients=config.actor.overlap_gradients,
        overlap_param_gather=config.actor.overlap_param_gather,
        layers="local" if config.actor.layers is Layers.local else "transformer_engine",
        whole_logits=config.actor.logits is Logits.whole,
        triton_logits=config.actor.logits is Logits.triton,
        offload=None if (asked := given.get("actor.offload")) is None else asked.value,
        offload_in_backward=given.get("actor.offload_in_backward"),
        lora=_adapters(config, spec),
        fp8=_fp8(config, gpu),
        quantized=_quantizes(config, spec),
        kv_cache_in_fp8=config.rollout.kv_cache_dtype is KvCacheDtype.fp8,
        unmerged=config.actor.lora.rollout is LoraRollout.unmerged,
        routing_replay=_replays(config, spec),
        virtual_stages=config.actor.virtual_stages,
        reference=algorithm.kl_coef > 0,
        value_model=needs_value_model(algorithm.advantage),
    )


def _replays(config: Config, spec: ModelSpec) -> RoutingReplay:
    """Raises ``ConfigError``: there are no routes to replay."""
    problems = [*routing_problems(config), *routing_model(config, spec)]
    if problems:
        raise ConfigError.of(problems)
    return config.actor.routing_replay


def _adapters(config: Config, spec: ModelSpec) -> Lora | None:
    """Raises ``ConfigError``: the model has no such matrices or layers."""
    problems = [
        *lora_problems(config, "sft"),
        *lora_model(config, spec),
        *unmerged_problems(config, Device.cuda),
        *unmerged_model(config, spec),
    ]
    if problems:
        raise ConfigError.of(problems)
    return adapters_of(config.actor.lora, spec, seed=0)


def _fp8(config: Config, gpu: Gpu) -> Fp8Training | None:
    """Raises ``UserError``: the card has no such products, or other settings no place for them."""
    fp8 = fp8_of(config.actor)
    if fp8 is None:
        return None
    if config.actor.layers is Layers.local:
        raise UserError(f"actor.fp8={fp8.format}: actor.layers=local has no FP8; use auto")
    problem = capability_problem(fp8, gpu.capability)
    if gpu.fp8_tflops is None or problem is not None:
        raise UserError(
            f"--gpu {gpu.name}: {problem or f'actor.fp8={fp8.format} is planned for CUDA alone'}"
        )
    return fp8


def _quantizes(config: Config, spec: ModelSpec) -> bool:
    """Raises ``ConfigError``: the model's engines have not been compared in FP8."""
    problems = [*quantization_problems(config, "evaluate"), *quantization_model(config, spec)]
    if problems:
        raise ConfigError.of(problems)
    return config.rollout.quantization is not Quantization.none


def _modules(config: Config, spec: ModelSpec) -> tuple[str, ...]:
    """Raises ``ConfigError``: Megatron or the model has no such modules."""
    problems = [*recompute_problems(config), *recompute_model(config, spec)]
    if problems:
        raise ConfigError.of(problems)
    return modules_of(config.actor, spec)


def _recomputed(given: Given) -> int | None:
    """Layers of a stage that are recomputed; ``None``: as few as fit."""
    recompute = given.get("actor.recompute")
    if recompute in (Recompute.none, Recompute.selective):
        return 0
    layers: int | None = given.get("actor.recompute_num_layers")
    return layers
