"""Faults of the routers of a MoE in an update."""

from __future__ import annotations

from typing import Any

from rlmath.commands.drill.fault import Fault
from rlmath.commands.drill.in_ranks import keep_weights, rank_fault, replace
from rlmath.commands.drill.in_update import (
    FROZEN,
    SHARES,
    moving,
    remember,
    routers_of,
    with_gradient,
)
from rlmath.config.schema import Config, DType

# Rate of pre-training, per update.
BIAS_RATE = 1e-3
FAULTS: list[Fault] = []


def _no_trained_router(config: Config) -> str | None:
    if config.actor.lora.rank:
        return "actor.lora.rank: routers have no adapter"
    return None if routers_of(config) else "model.path: a dense model has no router"


def _too_small(config: Config) -> str | None:
    if config.model.dtype is DType.bfloat16:
        return "model.dtype=bfloat16: the drill's routers have too few weights to all change"
    return _no_trained_router(config)


def _no_bias(config: Config) -> str | None:
    return None if routers_of(config) == "sigmoid" else "model.path: no router selects by a bias"


def _of_rank(worker: Any) -> list[Any]:
    return [m.router for m in worker.actor.module.modules() if hasattr(m, "router")]


@rank_fault(
    FAULTS,
    "no_router_gradient",
    SHARES,
    r"router\.weight.*adds nothing",
    missing=_no_trained_router,
)
def drop_a_routers_gradient(worker: Any) -> None:
    """A router gets no gradient, and moves on by Adam's moments."""
    for router in _of_rank(worker)[-1:]:
        with_gradient(worker, router.weight, lambda number, gradient: 0 * gradient)


@rank_fault(
    FAULTS,
    "frozen_router",
    "invariant: every matrix changes on every rank",
    r"did not change a single bit of .*mlp\.gate\.weight",
    missing=_too_small,
)
def freeze_the_routers(worker: Any) -> None:
    """The routers are never updated."""
    keep_weights(worker, worker.actor, lambda name: name.endswith("router.weight"))


@rank_fault(
    FAULTS,
    "moving_expert_bias",
    FROZEN,
    "weights that are frozen have changed: .*e_score_correction_bias",
    moving,
    missing=_no_bias,
)
def move_expert_biases(worker: Any) -> None:
    """The biases by which routers select experts follow their load, as in pre-training."""
    remember(worker, lambda: [router.expert_bias for router in _of_rank(worker)])
    config = worker.actor.chunks[0].config
    replace(worker, config, "moe_router_bias_update_rate", lambda _: BIAS_RATE)
