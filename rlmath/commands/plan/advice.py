"""What would fit, when nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
    why the model cannot be trained on these GPUs in any case.

    Raises:
        UserError: No layout fits; the message says what would.
    """
    try:
        return with_least_offload(request)
    except UserError as error:
        fitting = list(_what_would(request))
        advice = "\nwhat fits:\n  - " + "\n  - ".join(fitting) if fitting else ""
        warnings = "".join(f"\nwarning: {one}" for one in not_trained(request.spec, request.gpu))
        raise UserError(f"{error}{advice}{warnings}") from error


def _what_would(request: PlanRequest) -> Iterator[str]:
    """The least change of each kind with which something fits."""
    for times in _MORE_NODES:
        gpus = times * request.gpus
        node = max(request.gpus_per_node, min(gpus, 8))
        values = {"cluster.nodes": -(-gpus // node), "cluster.gpus_per_node": node}
        step = _step_s(request.with_settings(values))
        if step is not None:
            yield (
                f"{gpus} {request.gpu.name}: {' '.join(f'{k}={v}' for k, v in values.items())} "
                f"({step})"
            )
            break
    yield from _other_settings(request)
    larger = [gpu for gpu in GPUS.values() if gpu.memory_gib > request.gpu.memory_gib and gpu.runs]
    for gpu in sorted(larger, key=lambda one: one.memory_gib):
        step = _step_s(dataclasses.replace(request, gpu=gpu))
        if step is not None:
            yield f"{request.gpus} {gpu.name}: --gpu {gpu.name} ({step})"
    work = request.work
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
        step = _step_s(shorter)
        if step is not None:
            said = " ".join(f"{key}={value}" for key, value in values.items())
            yield f"shorter responses: {said} ({step})"
            break


def _other_settings(request: PlanRequest) -> Iterator[str]:
    """Settings with which it fits on the same GPUs, by what they give up."""
    given, chunked = request.given, {"actor.logits": Logits.chunked}
    if request.config.actor.logits is Logits.whole:
        step = _step_s(request.with_settings(chunked))
        if step is not None:
            yield f"logits in rows: actor.logits=chunked ({step})"
    if "actor.offload" in given.keys or given.get("actor.offload_in_backward") is False:
        free = dict.fromkeys(("actor.offload", "actor.offload_in_backward"))
        step = _step_s(request.with_settings(free))
        if step is not None:
            yield f"the optimizer's state in host memory ({step})"
    if not request.config.actor.lora.rank:
        step = _step_s(request.with_settings({"actor.lora.rank": _LORA_RANK}))
        if step is not None:
            yield f"adapters alone trained: actor.lora.rank={_LORA_RANK} ({step})"


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
