"""``rlmath plan layout``: which layouts fit, with the arithmetic."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rlmath.commands.plan.arguments import count, positive, share
from rlmath.commands.plan.gpus import GPUS, Efficiency
from rlmath.commands.plan.layouts import Wish, checked, find_plans, overrides
from rlmath.commands.plan.models import SHAPE_FLAGS, read_plan_model
from rlmath.commands.plan.report import as_json, as_text
from rlmath.commands.plan.time import Work
from rlmath.config.arithmetic import describe
from rlmath.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="a known name, a preset of conf/model, a folder, or its config.json",
    )
    for flag, field in SHAPE_FLAGS.items():
        add(flag, type=count, metavar="N", help=f"in place of a model: {field}")
    add("--head-dim", type=count, metavar="N", help="width of a head (default: hidden / heads)")
    add("--tied", action="store_true", help="the output layer is the embedding")
    add("--architecture", default="Qwen2ForCausalLM", help="of the sizes given one by one")
    add("--gpus", type=count, required=True, metavar="N", help="GPUs in all")
    add("--gpu", choices=sorted(GPUS), default="h100", help="the card (default: h100)")
    add("--gpu-gib", type=positive, metavar="GIB", help="its memory (default: the card's)")
    add("--gpus-per-node", type=count, default=8, metavar="N")
    add("--prompt-tokens", type=count, default=1024, metavar="N", help="longest prompt")
    add("--response-tokens", type=count, default=27648, metavar="N", help="longest response")
    add("--mean-response-tokens", type=count, metavar="N", help="default: half of the longest")
    add("--prompts", type=count, default=512, metavar="N", help="problems of a step")
    add("--group-size", type=count, default=16, metavar="N", help="samples of each")
    add("--minibatches", type=count, default=4, metavar="N", help="optimizer steps of a step")
    add("--max-tokens", type=count, metavar="N", help="of a micro-batch (default: one longest)")
    add("--max-running", type=count, default=256, metavar="N", help="sequences of an engine")
    add("--tp", type=count, metavar="N", help="only this actor.tensor_parallel")
    add("--pp", type=count, metavar="N", help="only this actor.pipeline_parallel")
    add("--cp", type=count, metavar="N", help="only this actor.context_parallel")
    add("--ep", type=count, metavar="N", help="only this actor.expert_parallel")
    add("--engine-tp", type=count, metavar="N", help="only this rollout.tensor_parallel")
    add("--recompute-layers", type=int, metavar="N", help="of a stage (default: as few as fit)")
    add("--local-layers", action="store_true", help="actor.layers=local, which keep more")
    add("--kl", action="store_true", help="with a KL term, whose reference model the host keeps")
    add("--value-model", action="store_true", help="with a value model, as GAE has")
    add("--mfu", type=share, help="share of the peak that the actor gets")
    add("--decode-bandwidth", type=share, help="share of memory bandwidth that sampling gets")
    add("--top", type=count, default=8, metavar="N", help="layouts to show")
    add("--json", action="store_true", help="every layout, with every term")


def run(arguments: argparse.Namespace) -> int:
    """Print the layouts that fit.

    Raises:
        UserError: None does, or the question makes no sense.
    """
    wish = wish_of(arguments)
    plans = find_plans(wish)
    best = plans[0]
    settings = overrides(wish, best.actor, best.engine_tp, best.engine_share)
    config, layout = checked(wish, settings)
    if arguments.json:
        print(json.dumps(as_json(wish, plans), indent=1))
    else:
        print(as_text(wish, plans, arguments.top, describe(config, layout)))
    return 0


def wish_of(arguments: argparse.Namespace) -> Wish:
    """What the options ask for.

    Raises:
        UserError: There is no such model, or a length is larger than what holds it.
    """
    path, spec = read_plan_model(arguments)
    gpu = GPUS[arguments.gpu]
    if arguments.gpu_gib is not None:
        gpu = dataclasses.replace(gpu, memory_gib=arguments.gpu_gib)
    mean = arguments.mean_response_tokens or max(1, arguments.response_tokens // 2)
    if mean > arguments.response_tokens:
        raise UserError(
            f"--mean-response-tokens {mean}: is more than --response-tokens "
            f"{arguments.response_tokens}, the longest"
        )
    longest = arguments.prompt_tokens + arguments.response_tokens
    if longest > spec.longest_sequence:
        raise UserError(
            f"--response-tokens {arguments.response_tokens}: {arguments.prompt_tokens} prompt + "
            f"{arguments.response_tokens} response = {longest} tokens, but the model has "
            f"{spec.longest_sequence} positions; take "
            f"{spec.longest_sequence - arguments.prompt_tokens} or less"
        )
    given = {"mfu": arguments.mfu, "decode_bandwidth": arguments.decode_bandwidth}
    return Wish(
        path=path,
        spec=spec,
        gpu=gpu,
        gpus=arguments.gpus,
        gpus_per_node=arguments.gpus_per_node,
        work=Work(
            prompts=arguments.prompts,
            group_size=arguments.group_size,
            minibatches=arguments.minibatches,
            prompt_tokens=arguments.prompt_tokens,
            response_tokens=arguments.response_tokens,
            mean_response_tokens=mean,
        ),
        max_tokens=arguments.max_tokens or longest,
        max_running=arguments.max_running,
        efficiency=Efficiency(**{name: value for name, value in given.items() if value}),
        tp=arguments.tp,
        pp=arguments.pp,
        cp=arguments.cp,
        ep=arguments.ep,
        engine_tp=arguments.engine_tp,
        recompute_layers=arguments.recompute_layers,
        layers="local" if arguments.local_layers else "transformer_engine",
        reference=arguments.kl,
        value_model=arguments.value_model,
    )
