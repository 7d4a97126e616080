"""``rlmath plan layout``: which layouts fit, with the arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rlmath.checks.lora import lora_model, lora_problems, unmerged_model, unmerged_problems
from rlmath.checks.quantization import quantization_model, quantization_problems
from rlmath.checks.recompute import recompute_model, recompute_problems
from rlmath.checks.routing import routing_model, routing_problems
from rlmath.commands.plan.advice import plans_or_advice
from rlmath.commands.plan.experiment import train_command, write_experiment
from rlmath.commands.plan.gpus import GPUS, Efficiency, Gpu, gpu_named
from rlmath.commands.plan.models import SHAPE_FLAGS, read_plan_model
from rlmath.commands.plan.report import as_json, as_text
from rlmath.commands.plan.request import CALL_S, PlanRequest, check_settings, overrides
from rlmath.config.arithmetic import describe
from rlmath.config.command_line import Given, count, positive, share
from rlmath.config.fp8_training import fp8_of
from rlmath.config.rollout import has_turns
from rlmath.config.schema import Config, Device, Layers
from rlmath.errors import ConfigError, UserError
from rlmath.model.fp8_training import capability_problem
from rlmath.model.spec import ModelSpec

# Settings that a plan of layouts depends on. A setting of a layout that is not given is chosen.
SETTINGS = (
    "plugins",
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
    "rollout.tools",
    "rollout.environment",
    "rollout.parallel_calls",
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
    "actor.max_tokens_per_forward",
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
    add = parser.add_argument
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
    add("--calls", type=positive, metavar="N", help="mean calls of a response (default: 1)")
    add(
        "--call-s", type=positive, metavar="S", help=f"mean seconds of a call (default: {CALL_S:g})"
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
    """Print the layouts that fit. Raises UserError: none does, or the question makes no sense."""
    request, plans = plans_or_advice(request_of(arguments, given))
    settings = overrides(request, plans[0])
    config, layout = check_settings(request, settings)
    if arguments.json:
        print(json.dumps(as_json(request, plans), indent=1))
    elif arguments.command:
        print(train_command(request, settings))
    else:
        print(as_text(request, plans, arguments.top, describe(config, layout)))
    if arguments.write:
        file = write_experiment(request, settings, arguments.write, arguments.config_dir)
        where = f"--config-dir {arguments.config_dir} " if arguments.config_dir else ""
        print(f"\nwritten: {file}\n  rlmath train {where}experiment={arguments.write} --check")
    return 0


def request_of(arguments: argparse.Namespace, given: Given) -> PlanRequest:
    """The request that settings and options make. Raises UserError: there is no such model, a
    length is larger than what holds it, or settings do not fit each other, the model or the card.
    """
    config = given.config
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
    problems = list(_problems(config, spec, gpu))
    if problems:
        raise ConfigError.of(problems)
    shares = {"mfu": arguments.mfu, "decode_bandwidth": arguments.decode_bandwidth}
    efficiency = Efficiency(**{name: value for name, value in shares.items() if value})
    has_tools = has_turns(config.rollout)
    if not has_tools and (arguments.calls or arguments.call_s):
        raise UserError(
            "--calls, --call-s: no tools are given; add rollout.tools=[python] or "
            "rollout.environment=my_module:MyEnv"
        )
    calls = (arguments.calls or 1.0) if has_tools else 0.0
    call_s = arguments.call_s or CALL_S
    return PlanRequest(path, spec, gpu, given, mean, efficiency, calls, call_s)


def _problems(config: Config, spec: ModelSpec, gpu: Gpu) -> Iterator[str]:
    """Settings that the model or the card has no place for, which the search would not find out."""
    yield from recompute_problems(config)
    yield from recompute_model(config, spec)
    yield from lora_problems(config, "sft")
    yield from lora_model(config, spec)
    yield from unmerged_problems(config, Device.cuda)
    yield from unmerged_model(config, spec)
    yield from quantization_problems(config, "evaluate")
    yield from quantization_model(config, spec)
    yield from routing_problems(config)
    yield from routing_model(config, spec)
    fp8 = fp8_of(config.actor)
    if fp8 is None:
        return
    if config.actor.layers is Layers.local:
        yield f"actor.fp8={fp8.format}: actor.layers=local has no FP8; use auto"
    problem = capability_problem(fp8, gpu.capability)
    if gpu.fp8_tflops is None or problem is not None:
        yield f"--gpu {gpu.name}: {problem or f'actor.fp8={fp8.format} is planned for CUDA alone'}"
