"""Layouts and settings that would fit, when nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlmath.commands.plan.gpus import GPUS
from rlmath.commands.plan.layouts import Plan, with_least_offload
from rlmath.commands.plan.report import not_trained
from rlmath.commands.plan.request import PlanRequest
from rlmath.config.quoting import override
from rlmath.config.schema import Logits
from rlmath.errors import UserError

# How many times the nodes are tried.
_MORE_NODES = (2, 4, 8)
# Shares of the longest response that are tried.
_SHORTER = (2, 4, 8)
_LORA_RANK = 32


def plans_or_advice(request: PlanRequest) -> tuple[PlanRequest, list[Plan]]:
    """:func:`~rlmath.commands.plan.layouts.with_least_offload`, with a way out in its message, and
    why the model cannot be trained on these GPUs in any case. Raises UserError: no layout fits; the
    message says what would."""
    try:
        return with_least_offload(request)
    except UserError as error:
        fitting = list(_what_would(request))
        advice = "\nwhat fits:\n  - " + "\n  - ".join(fitting) if fitting else ""
        warnings = "".join(f"\nwarning: {one}" for one in not_trained(request.spec, request.gpu))
        raise UserError(f"{error}{advice}{warnings}") from error


def _what_would(request: PlanRequest) -> Iterator[str]:
    """The least change of each kind with which something fits."""
    for kind in (_more_nodes, _other_settings, _larger_gpus, _shorter_responses):
        for alternatives in kind(request):
            for text, other in alternatives:
                step = _step_s(other)
                if step is not None:
                    yield f"{text} ({step})"
                    break


# Changes of a kind: for each of its ways, from the least change to the largest.
_Changes = Iterator[Iterable[tuple[str, PlanRequest]]]


def _format_values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def _more_nodes(request: PlanRequest) -> _Changes:
    found = []
    for times in _MORE_NODES:
        gpus = times * request.gpus
        node = max(request.gpus_per_node, min(gpus, 8))
        values = {"cluster.nodes": -(-gpus // node), "cluster.gpus_per_node": node}
        text = f"{gpus} {request.gpu.name}: {_format_values(values)}"
        found.append((text, request.with_settings(values)))
    yield found


def _other_settings(request: PlanRequest) -> _Changes:
    """Advice for the same GPUs, by the settings that it changes."""
    given, config = request.given, request.config
    if config.actor.logits is Logits.whole:
        chunked = request.with_settings({"actor.logits": Logits.chunked})
        yield [("logits in rows: actor.logits=chunked", chunked)]
    if "actor.offload" in given.keys or given.get("actor.offload_in_backward") is False:
        free = dict.fromkeys(("actor.offload", "actor.offload_in_backward"))
        yield [("the optimizer's state in host memory", request.with_settings(free))]
    if not config.actor.lora.rank:
        rank = {"actor.lora.rank": _LORA_RANK}
        yield [(f"adapters alone trained: {_format_values(rank)}", request.with_settings(rank))]


def _larger_gpus(request: PlanRequest) -> _Changes:
    larger = [gpu for gpu in GPUS.values() if gpu.memory_gib > request.gpu.memory_gib and gpu.runs]
    for gpu in sorted(larger, key=lambda one: one.memory_gib):
        other = dataclasses.replace(request, gpu=gpu)
        yield [(f"{request.gpus} {gpu.name}: --gpu {gpu.name}", other)]


def _shorter_responses(request: PlanRequest) -> _Changes:
    work, found = request.work, []
    for part in _SHORTER:
        tokens = work.response_tokens // part
        longest = work.prompt_tokens + tokens
        # A budget that was made for the longest sequence shrinks with it.
        budget = min(request.given.get("actor.max_tokens_per_microbatch") or longest, longest)
        values = {
            "rollout.max_response_tokens": tokens,
            "actor.max_tokens_per_microbatch": budget,
        }
        mean = min(work.mean_response_tokens, max(1, tokens // 2))
        shorter = dataclasses.replace(request, mean_response_tokens=mean).with_settings(values)
        found.append((f"shorter responses: {_format_values(values)}", shorter))
    yield found


def _step_s(request: PlanRequest) -> str | None:
    """Predicted time of a step of the best layout; ``None``: nothing fits."""
    try:
        chosen, (best, *_) = with_least_offload(request)
    except UserError:
        return None
    keys = ("actor.offload", "actor.offload_in_backward")
    before, now = (
        {key: override(key, one.given.get(key) or False) for key in keys}
        for one in (request, chosen)
    )
    moved = [word for key, word in now.items() if word != before[key]] if chosen.offloads else []
    added = ", " + " ".join(moved) if moved else ""
    return f"{best.step_s:,.0f} s a step{added}"
