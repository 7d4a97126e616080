"""What would fit, when nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlmath.commands.plan.gpus import GPUS
from rlmath.commands.plan.layouts import Plan, with_least_offload
from rlmath.commands.plan.report import not_trained
from rlmath.commands.plan.wish import Wish
from rlmath.config.lora import LoraConfig
from rlmath.errors import UserError
from rlmath.model.lora import Lora, default_targets

# How many times the nodes are tried.
_MORE_NODES = (2, 4, 8)
# Shares of the longest response that are tried.
_SHORTER = (2, 4, 8)
_LORA_RANK = 32


def plans_or_advice(wish: Wish) -> tuple[Wish, list[Plan]]:
    """:func:`~rlmath.commands.plan.layouts.with_least_offload`, with a way out in its message, and
    why the model cannot be trained on these GPUs in any case.

    Raises:
        UserError: No layout fits; the message says what would.
    """
    try:
        return with_least_offload(wish)
    except UserError as error:
        fitting = list(_what_would(wish))
        advice = "\nwhat fits:\n  - " + "\n  - ".join(fitting) if fitting else ""
        warnings = "".join(f"\nwarning: {one}" for one in not_trained(wish.spec, wish.gpu))
        raise UserError(f"{error}{advice}{warnings}") from error


def _what_would(wish: Wish) -> Iterator[str]:
    """The least change of each kind with which something fits."""
    for times in _MORE_NODES:
        gpus = times * wish.gpus
        more = dataclasses.replace(
            wish, gpus=gpus, gpus_per_node=max(wish.gpus_per_node, min(gpus, 8))
        )
        step = _step_s(more)
        if step is not None:
            yield (
                f"{gpus} {wish.gpu.name}: cluster.nodes={more.nodes} "
                f"cluster.gpus_per_node={more.gpus_per_node} ({step})"
            )
            break
    yield from _other_settings(wish)
    larger = [gpu for gpu in GPUS.values() if gpu.memory_gib > wish.gpu.memory_gib and gpu.runs]
    for gpu in sorted(larger, key=lambda one: one.memory_gib):
        step = _step_s(dataclasses.replace(wish, gpu=gpu))
        if step is not None:
            yield f"{wish.gpus} {gpu.name}: --gpu {gpu.name} ({step})"
    work = wish.work
    for part in _SHORTER:
        tokens = work.response_tokens // part
        shorter = dataclasses.replace(
            work,
            response_tokens=tokens,
            mean_response_tokens=min(work.mean_response_tokens, max(1, tokens // 2)),
        )
        # A budget that was made for the longest sequence shrinks with it.
        budget = min(wish.max_tokens or shorter.longest_tokens, shorter.longest_tokens)
        step = _step_s(dataclasses.replace(wish, work=shorter, max_tokens=budget))
        if step is not None:
            yield (
                f"shorter responses: rollout.max_response_tokens={tokens} "
                f"actor.max_tokens_per_microbatch={budget} ({step})"
            )
            break


def _other_settings(wish: Wish) -> Iterator[str]:
    """Settings with which it fits on the same GPUs, by what they give up."""
    if wish.whole_logits:
        step = _step_s(dataclasses.replace(wish, whole_logits=False))
        if step is not None:
            yield f"logits in rows: actor.logits=chunked ({step})"
    if wish.offload is not None or wish.offload_in_backward is False:
        step = _step_s(dataclasses.replace(wish, offload=None, offload_in_backward=None))
        if step is not None:
            yield f"the optimizer's state in host memory ({step})"
    lora = Lora(_LORA_RANK, LoraConfig.alpha, default_targets(wish.spec))
    if wish.lora is None:
        step = _step_s(dataclasses.replace(wish, lora=lora))
        if step is not None:
            yield f"adapters alone trained: actor.lora.rank={lora.rank} ({step})"


def _step_s(wish: Wish) -> str | None:
    """Predicted time of a step of the best layout; ``None``: nothing fits."""
    try:
        chosen, (best, *_) = with_least_offload(wish)
    except UserError:
        return None
    moved = [f"actor.offload={chosen.offload}"] if chosen.offload != wish.offload else []
    if chosen.offload_in_backward and not wish.offload_in_backward:
        moved += ["actor.offload_in_backward=true"]
    added = ", " + " ".join(moved) if moved and chosen.offload != "none" else ""
    return f"{best.step_s:,.0f} s a step{added}"
