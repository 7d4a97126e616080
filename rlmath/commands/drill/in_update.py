"""Faults of an update on the ranks: advantages, loss, gradient, optimizer, and frozen weights."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from rlmath.commands.drill.fault import Fault, Scene
from rlmath.commands.drill.in_ranks import RankPlant, plant_in_ranks, rank_fault, replace, wrap
from rlmath.commands.drill.in_samples import (
    FOLLOW,
    OPPOSITE,
    OWN,
    no_data_parallel,
    unknown_advantages,
)
from rlmath.config.algorithm import KlPlace, ReferenceKind, needs_old_log_probs
from rlmath.config.optimizer import Schedule
from rlmath.config.schema import Config
from rlmath.errors import ModelError
from rlmath.model.spec import read_model_spec

# Attribute of a worker with frozen weights and their first values.
_STILL = "_still_of_drill"
SHIFT = 7
RATE = 3.0
TERMS = "check: the loss is the sum of its terms"
FROZEN = "check: frozen weights"
UPDATE = "check: Adam's step recomputed"
SHARES = "check: shares of the gradient"
SLOPES = "check: the gradient against forward passes"
OTHER_SLOPE = "gives other log-probs than the gradient says"
NO_GRADIENT = "are not those of their advantages|gradient of exactly 0|gradient norm is exactly 0"
FAULTS: list[Fault] = []


# -- where a fault does not apply ---------------------------------------------------------------


def _no_kl(config: Config) -> str | None:
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_in is KlPlace.loss:
        return None
    return "algorithm.kl_coef=0, or the KL is in the reward: the loss has no KL term"


def _no_entropy(config: Config) -> str | None:
    has = config.algorithm.entropy_coef or config.algorithm.entropy_target is not None
    return None if has else "algorithm.entropy_coef=0: there is no entropy bonus"


def _no_reference(config: Config) -> str | None:
    algorithm = config.algorithm
    if config.actor.lora.rank:
        return "actor.lora.rank: the reference is the base model"
    if algorithm.kl_coef and algorithm.reference.kind is ReferenceKind.frozen:
        return None
    return "algorithm.kl_coef=0, or the reference is renewed: none is frozen"


def _no_lora(config: Config) -> str | None:
    return None if config.actor.lora.rank else "actor.lora.rank=0: there is no base model"


def _sums_in_pass(config: Config) -> str | None:
    if config.actor.overlap_gradients:
        return "actor.overlap_gradients=true: no gradient is there before the sum over ranks"
    return None


def _has_experts(config: Config) -> str | None:
    if routers_of(config):
        return "model.path: the smallest move of a MoE's weights changes routes"
    return None


def routers_of(config: Config) -> str:
    """The kind of a model's routers; empty: it has none."""
    try:
        spec = read_model_spec(config.model.path)
    except ModelError:
        return ""  # There is none yet.
    return "" if not spec.experts else "sigmoid" if spec.family.sigmoid_router else "softmax"


def _constant(config: Config) -> str | None:
    # A drill has no warm-up.
    if config.actor.optimizer.schedule is Schedule.constant:
        return "actor.optimizer.schedule=constant: it has no place"
    return None


# -- advantages and loss ------------------------------------------------------------------------


@rank_fault(FAULTS, "negated_on_ranks", OWN, OPPOSITE, missing=unknown_advantages)
def negate_on_ranks(worker: Any) -> None:
    """The ranks' advantages have the opposite sign."""
    from rlmath.actor import rank_step

    wrap(worker, rank_step, "token_advantages", lambda find, *x: -find(*x))


@rank_fault(FAULTS, "shifted_advantages", OWN, FOLLOW, missing=unknown_advantages)
def shift_on_ranks(worker: Any) -> None:
    """Each token has the advantage of one 7 tokens before it."""
    from rlmath.actor import rank_step

    wrap(worker, rank_step, "token_advantages", lambda find, *x: find(*x).roll(SHIFT))


@rank_fault(FAULTS, "no_gradient", "check: gradients of each sequence", NO_GRADIENT)
def drop_a_gradient(worker: Any) -> None:
    """The first micro-batch has no gradient."""
    from rlmath.actor import policy

    def loss_of(policy_loss: Any, *arguments: Any) -> Any:
        objective, numbers = policy_loss(*arguments), itertools.count()

        def losing(*given: Any) -> Any:
            loss, kept = objective(*given)
            return (loss if next(numbers) else 0.0 * loss), kept

        return losing

    wrap(worker, policy, "policy_loss", loss_of)


def _with_objective(worker: Any, **changes: Callable[[Any], Any]) -> None:
    from rlmath.actor import policy_loss

    def changing(objective: Any, inputs: Any, settings: Any) -> Any:
        other = {name: change(getattr(settings, name)) for name, change in changes.items()}
        return objective(inputs, dataclasses.replace(settings, **other))

    wrap(worker, policy_loss, "policy_objective", changing)


@rank_fault(FAULTS, "no_kl", TERMS, "the KL term is missing", missing=_no_kl)
def drop_the_kl(worker: Any) -> None:
    """The KL term is measured, but not in the loss."""
    _with_objective(worker, kl_coef=lambda _: 0.0)


@rank_fault(
    FAULTS, "entropy_sign", TERMS, "the entropy bonus has the opposite sign", missing=_no_entropy
)
def turn_the_entropy(worker: Any) -> None:
    """The entropy bonus has the opposite sign."""
    _with_objective(worker, entropy_coef=lambda coef: -coef)


def _one_minibatch(config: Config) -> str | None:
    algorithm = config.algorithm
    if algorithm.minibatches_per_step > 1 and needs_old_log_probs(algorithm):
        return None
    return "algorithm.minibatches_per_step=1, or old log-probs come with no pass of the actor"


@rank_fault(
    FAULTS,
    "other_old_log_probs",
    "check: log-probs in the loss",
    "sequences had other .*log-probs in the loss",
    missing=_one_minibatch,
)
def take_other_log_probs(worker: Any) -> None:
    """From the second minibatch on, each sequence has old log-probs of the next one."""

    def updating(update: Any, share: Any, plan: Any, begin: int, index: int, *more: Any) -> None:
        if index:
            old = share.batch.old_log_probs.roll(-int(share.batch.response_lengths[0]))
            batch = dataclasses.replace(share.batch, old_log_probs=old)
            share = dataclasses.replace(share, batch=batch)
        update(share, plan, begin, index, *more)

    wrap(worker, worker.actor, "_update_minibatch", updating)


@rank_fault(
    FAULTS,
    "no_kl_gradient",
    "check: a second formula of the objective",
    "a second formula gives",
    missing=_no_kl,
)
def detach_the_kl(worker: Any) -> None:
    """The KL term is in the loss, and has no gradient."""
    from rlmath.algorithms import objective

    wrap(worker, objective, "kl_estimate", lambda estimate, *x: estimate(*x).detach())


# -- weights and optimizer ----------------------------------------------------------------------


def _after_steps(worker: Any, change: Callable[[], None]) -> None:
    import torch

    @torch.no_grad()
    def finishing(finish: Callable[[bool], float], discard: bool) -> float:
        lr = finish(discard)
        change()
        return lr

    wrap(worker, worker.actor, "finish_minibatch", finishing)


def remember(worker: Any, tensors: Callable[[], list[Any]]) -> None:
    """Keep the values of frozen weights for :func:`put_back`."""
    worker.actor.load_parameters()
    # A reference is in other tensors after each pass.
    worker.__dict__[_STILL] = tensors, [one.detach().clone() for one in tensors()]


def _moving(worker: Any, tensors: Callable[[], list[Any]]) -> None:
    remember(worker, tensors)

    def move() -> None:
        worker.actor.load_parameters()
        for one in tensors():
            one.mul_(1.01)

    _after_steps(worker, move)


def put_back(worker: Any) -> None:
    """Restore frozen weights, which no checkpoint has."""
    import torch

    worker.actor.load_parameters()
    tensors, values = worker.__dict__.pop(_STILL, (list, []))
    with torch.no_grad():
        for one, value in zip(tensors(), values, strict=True):
            one.copy_(value)


@contextlib.contextmanager
def moving(scene: Scene, plant: RankPlant) -> Iterator[None]:
    """Frozen weights move until the end of the context."""
    try:
        with plant_in_ranks(scene, plant):
            yield
    finally:
        scene.run.actor.call(put_back)


@rank_fault(
    FAULTS,
    "moving_reference",
    FROZEN,
    "weights that are frozen have changed: .*reference model",
    moving,
    missing=_no_reference,
)
def move_the_reference(worker: Any) -> None:
    """The frozen reference moves."""
    _moving(worker, lambda: list(worker.actor.reference or ()))


@rank_fault(
    FAULTS,
    "moving_base",
    FROZEN,
    "weights that are frozen have changed: .*base model",
    moving,
    missing=_no_lora,
)
def move_the_base(worker: Any) -> None:
    """The base model under LoRA moves."""
    frozen = [p for p in worker.actor.module.parameters() if not p.requires_grad and p.dim() > 1]
    _moving(worker, lambda: frozen[-1:])


def _around_steps(worker: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    def stepping(step: Any) -> Any:
        before()
        try:
            return step()
        finally:
            after()

    wrap(worker, worker.actor.optimizer, "step", stepping)


@rank_fault(FAULTS, "triple_rate", UPDATE, "did not take Adam's step")
def triple_the_rate(worker: Any) -> None:
    """Adam steps at three times the scheduled learning rate."""
    groups = worker.actor.optimizer.param_groups

    def times(factor: float) -> None:
        for group in groups:
            group["lr"] *= factor

    _around_steps(worker, lambda: times(RATE), lambda: times(1 / RATE))


@rank_fault(FAULTS, "zeroed_moments", UPDATE, "Adam's first moment")
def zero_the_moments(worker: Any) -> None:
    """Adam's moments are 0 before each step."""
    from rlmath.checkpoint.optimizer_state import clear_optimizer_state

    _around_steps(worker, lambda: clear_optimizer_state(worker.actor.optimizer), lambda: None)


@rank_fault(
    FAULTS, "lost_moments", UPDATE, "Adam's first moment is not what the last step left", latest=2
)
def lose_the_moments(worker: Any) -> None:
    """Adam's moments are lost once."""
    from rlmath.checkpoint.optimizer_state import clear_optimizer_state

    with worker.actor.device_state.optimizer_readable():
        clear_optimizer_state(worker.actor.optimizer)


@rank_fault(
    FAULTS,
    "schedule_again",
    "check: the schedule's learning rate",
    "the schedule was changed or began again",
    missing=_constant,
)
def begin_the_schedule_again(worker: Any) -> None:
    """The learning-rate schedule begins again."""
    worker.actor.scheduler.num_steps = 0
    worker.actor.scheduler.step(0)


def last_matrix(worker: Any) -> Any:
    """One matrix of the last layer."""
    return worker.actor.gradient_shares.layers[-1][1]


def with_gradient(worker: Any, matrix: Any, change: Callable[[int, Any], Any]) -> None:
    """Change the gradient of a matrix, of each micro-batch by its number."""

    def running(run: Callable[..., Any], *arguments: Any) -> Any:
        numbers = itertools.count()
        handle = matrix.register_hook(lambda gradient: change(next(numbers), gradient))
        try:
            return run(*arguments)
        finally:
            handle.remove()

    wrap(worker, worker.actor, "forward_backward", running)


@rank_fault(FAULTS, "no_layer_gradient", SHARES, "adds nothing to it")
def drop_a_layers_gradient(worker: Any) -> None:
    """One matrix gets no gradient, and moves on by Adam's moments."""
    with_gradient(worker, last_matrix(worker), lambda number, gradient: 0 * gradient)


@rank_fault(FAULTS, "no_share_of_layer", SHARES, "adds nothing to it")
def drop_a_layers_micro_batch(worker: Any) -> None:
    """One matrix gets no gradient from the first micro-batch."""
    with_gradient(
        worker, last_matrix(worker), lambda number, gradient: gradient if number else 0 * gradient
    )


@rank_fault(FAULTS, "double_gradient", SLOPES, OTHER_SLOPE, from_step=1, missing=_has_experts)
def double_below_a_layer(worker: Any) -> None:
    """The gradient doubles on its way through the first layer."""
    if worker.actor.parallel.pp_rank:
        return

    def doubling(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: 2 * gradient)
        return output

    wrap(worker, worker.actor.chunks[0].decoder.layers[0], "forward", doubling)


@rank_fault(
    FAULTS,
    "no_rank_gradient",
    SHARES,
    "is not the sum over micro-batches|the gradient norm is exactly 0",
    missing=_sums_in_pass,
)
def drop_a_ranks_gradient(worker: Any) -> None:
    """A data-parallel rank's gradient is lost before the sum over ranks."""
    actor = worker.actor
    if actor.dp_rank != actor.layout.data_parallel - 1:
        return

    def finalizing(finalize: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        for one in actor.models:
            one.zero_grad_buffer()
        return finalize(*arguments, **options)

    wrap(worker, actor.chunks[0].config, "finalize_model_grads_func", finalizing)


@rank_fault(
    FAULTS,
    "no_sum",
    SHARES,
    "is not the sum over micro-batches|holds other weights than rank 0",
    missing=no_data_parallel,
)
def sum_nothing(worker: Any) -> None:
    """Gradients are not summed over data-parallel ranks."""
    config = worker.actor.chunks[0].config
    replace(worker, config, "finalize_model_grads_func", lambda _: lambda *_, **__: None)
