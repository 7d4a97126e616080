"""Faults between reward and optimizer, where one set of numbers is computed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rlmath.commands.drill.fault import Fault, Plant, Scene
from rlmath.commands.drill.in_engines import is_latent
from rlmath.commands.drill.in_ranks import planted, replace
from rlmath.config.algorithm import KlPlace, ReferenceKind
from rlmath.config.optimizer import Schedule
from rlmath.config.schema import Config
from rlmath.training.checks.own_advantages import ESTIMATORS

# Of a worker: frozen weights and what they were.
_STILL = "_still_of_drill"
SHIFT = 7
RATE = 3.0


# -- advantages and rewards, in the driver ------------------------------------------------------


@contextlib.contextmanager
def in_batch(scene: Scene, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``make(original)`` in the place of a function that ``StepBatch`` calls."""
    from rlmath.training import step_batch

    with mock.patch.object(step_batch, name, make(getattr(step_batch, name))):
        yield


def negated(estimate: Any) -> Any:
    """Advantages of the opposite sign."""

    def estimated(*arguments: Any, **options: Any) -> Any:
        found = estimate(*arguments, **options)
        return dataclasses.replace(found, values=-found.values)

    return estimated


def in_next_group(estimate: Any) -> Any:
    """Each group's last sample counts in the next group."""

    def estimated(rewards: Any, groups: Any, *arguments: Any, **options: Any) -> Any:
        return estimate(rewards, groups.roll(1), *arguments, **options)

    return estimated


def moved_on(rewards_of: Any) -> Any:
    """Each sample has the reward of the one before it."""
    return lambda *arguments: rewards_of(*arguments).roll(1, 0)


@contextlib.contextmanager
def another_text(scene: Scene) -> Iterator[None]:
    """Each sample of a group has the grade of the one after it."""
    from rlmath.rewards.mix import RewardMix

    original = RewardMix.graded

    def graded(self: Any, samples: Any, partials: Any) -> Any:
        return original(self, samples, [*partials[1:], *partials[:1]])

    with mock.patch.object(RewardMix, "graded", graded):
        yield


@contextlib.contextmanager
def lost_ends(scene: Scene) -> Iterator[None]:
    """Responses that ended lose their end-of-sequence token."""
    from rlmath.rollout.pool import RolloutPool

    original = RolloutPool.generate

    def generate(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for sample in original(self, *arguments, **options):
            ended = sample.finish_reason == "stop" and len(sample.token_ids) > 1
            tokens, log_probs = sample.token_ids[:-1], sample.log_probs[:-1]
            changed = {"token_ids": tokens, "log_probs": log_probs} if ended else {}
            yield dataclasses.replace(sample, **changed)

    with mock.patch.object(RolloutPool, "generate", generate):
        yield


@contextlib.contextmanager
def shard_of_another_rank(scene: Scene) -> Iterator[None]:
    """The second data-parallel rank trains the first one's sequences."""
    from rlmath.actor import group

    original = group.shards

    def first_twice(*arguments: Any, **options: Any) -> Iterator[Any]:
        first, *others = original(*arguments, **options)
        yield from (first, first, *others[1:])

    with mock.patch.object(group, "shards", first_twice):
        yield


# -- advantages and loss, on the ranks ----------------------------------------------------------


def negate_on_ranks(worker: Any) -> None:
    """The advantages of all tokens have the opposite sign."""
    from rlmath.actor import rank_step

    replace(worker, rank_step, "token_advantages", lambda find: lambda *x: -find(*x))


def shift_on_ranks(worker: Any) -> None:
    """Each token has the advantage of one a few tokens before it."""
    from rlmath.actor import rank_step

    replace(worker, rank_step, "token_advantages", lambda find: lambda *x: find(*x).roll(SHIFT))


def drop_a_gradient(worker: Any) -> None:
    """The first micro-batch of each minibatch has no gradient."""
    from rlmath.actor import policy

    def make(policy_loss: Any) -> Any:
        def loss_of(*arguments: Any) -> Any:
            objective, seen = policy_loss(*arguments), []

            def losing(one: Any, log_probs: Any, entropy: Any) -> Any:
                loss, kept = objective(one, log_probs, entropy)
                seen.append(one)
                return (0.0 * loss if len(seen) == 1 else loss), kept

            return losing

        return loss_of

    replace(worker, policy, "policy_loss", make)


def _with_objective(worker: Any, **changes: Callable[[Any], Any]) -> None:
    from rlmath.actor import policy_loss

    def make(objective: Any) -> Any:
        def changed(inputs: Any, settings: Any) -> Any:
            other = {name: change(getattr(settings, name)) for name, change in changes.items()}
            return objective(inputs, dataclasses.replace(settings, **other))

        return changed

    replace(worker, policy_loss, "policy_objective", make)


def drop_the_kl(worker: Any) -> None:
    """The KL term is measured and not in the loss."""
    _with_objective(worker, kl_coef=lambda _: 0.0)


def turn_the_entropy(worker: Any) -> None:
    """The entropy bonus has the opposite sign."""
    _with_objective(worker, entropy_coef=lambda coef: -coef)


# -- weights and optimizer ----------------------------------------------------------------------


def _after_steps(worker: Any, change: Callable[[], None]) -> None:
    import torch

    def make(finish: Callable[[bool], float]) -> Callable[[bool], float]:
        @torch.no_grad()
        def finishing(discard: bool) -> float:
            lr = finish(discard)
            change()
            return lr

        return finishing

    replace(worker, worker.actor, "finish_minibatch", make)


def move_the_reference(worker: Any) -> None:
    """The frozen reference moves a little after each optimizer step."""
    _moving(worker, lambda: list(worker.actor.reference or ()))


def move_the_base(worker: Any) -> None:
    """A matrix of the base model moves a little after each optimizer step."""
    frozen = [p for p in worker.actor.module.parameters() if not p.requires_grad and p.dim() > 1]
    _moving(worker, lambda: frozen[-1:])


def _moving(worker: Any, tensors: Callable[[], list[Any]]) -> None:
    worker.actor.load_parameters()
    # A reference is in other tensors after each pass.
    worker.__dict__[_STILL] = tensors, [one.detach().clone() for one in tensors()]

    def move() -> None:
        worker.actor.load_parameters()
        for one in tensors():
            one.mul_(1.01)

    _after_steps(worker, move)


def put_back(worker: Any) -> None:
    """Frozen weights as they were: no checkpoint has them."""
    import torch

    worker.actor.load_parameters()
    tensors, values = worker.__dict__.pop(_STILL, (list, []))
    with torch.no_grad():
        for one, value in zip(tensors(), values, strict=True):
            one.copy_(value)


@contextlib.contextmanager
def moving(scene: Scene, plant: Callable[[Any], None]) -> Iterator[None]:
    """Frozen weights move until the end of the context."""
    try:
        with planted(scene, plant):
            yield
    finally:
        scene.run.actor.call(put_back)


def _around_steps(worker: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    def make(step: Any) -> Any:
        def stepping() -> Any:
            before()
            try:
                return step()
            finally:
                after()

        return stepping

    replace(worker, worker.actor.optimizer, "step", make)


def triple_the_rate(worker: Any) -> None:
    """Adam steps at three times the scheduled learning rate."""
    groups = worker.actor.optimizer.param_groups

    def times(factor: float) -> None:
        for group in groups:
            group["lr"] *= factor

    _around_steps(worker, lambda: times(RATE), lambda: times(1 / RATE))


def zero_the_moments(worker: Any) -> None:
    """Adam's moments are 0 before each step."""
    from rlmath.checkpoint.optimizer_state import clear_optimizer_state

    _around_steps(worker, lambda: clear_optimizer_state(worker.actor.optimizer), lambda: None)


def lose_the_moments(worker: Any) -> None:
    """Adam's moments are lost once."""
    from rlmath.checkpoint.optimizer_state import clear_optimizer_state

    with worker.actor.device_state.optimizer_readable():
        clear_optimizer_state(worker.actor.optimizer)


def begin_the_schedule_again(worker: Any) -> None:
    """The learning-rate schedule begins again."""
    worker.actor.scheduler.num_steps = 0
    worker.actor.scheduler.step(0)


def _with_gradient(worker: Any, change: Callable[[int, Any], Any]) -> None:
    """Change the gradient of one matrix of the last layer, of each micro-batch by its number."""
    _, matrix = worker.actor.gradient_shares.watched[-1]

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*arguments: Any) -> Any:
            numbers = itertools.count()
            handle = matrix.register_hook(lambda gradient: change(next(numbers), gradient))
            try:
                return run(*arguments)
            finally:
                handle.remove()

        return running

    replace(worker, worker.actor, "forward_backward", make)


def drop_a_layers_gradient(worker: Any) -> None:
    """A matrix gets no gradient, and moves on by its moments."""
    _with_gradient(worker, lambda number, gradient: 0 * gradient)


def drop_a_layers_micro_batch(worker: Any) -> None:
    """A matrix gets no gradient from the first micro-batch."""
    _with_gradient(worker, lambda number, gradient: gradient if number else 0 * gradient)


def drop_a_ranks_gradient(worker: Any) -> None:
    """The last data-parallel rank's gradient is cleared before the sum over ranks."""
    actor = worker.actor
    if actor.dp_rank != actor.layout.data_parallel - 1:
        return

    def make(finalize: Callable[..., Any]) -> Callable[..., Any]:
        def finalizing(*arguments: Any, **options: Any) -> Any:
            for one in actor.models:
                one.zero_grad_buffer()
            return finalize(*arguments, **options)

        return finalizing

    replace(worker, actor.chunks[0].config, "finalize_model_grads_func", make)


def sum_nothing(worker: Any) -> None:
    """Gradients are not summed over data-parallel ranks."""
    config = worker.actor.chunks[0].config
    replace(worker, config, "finalize_model_grads_func", lambda _: lambda *_, **__: None)


# -- resume and export --------------------------------------------------------------------------


@contextlib.contextmanager
def resumed(scene: Scene, lose: str) -> Iterator[None]:
    """A resume after which a part of the optimizer's state is not what was saved.

    Args:
        lose: The function that does not restore it.
    """
    folder = scene.folder / f"resumed_without_{lose}"
    folder.mkdir(parents=True, exist_ok=True)
    scene.run.actor.save_checkpoint(folder)
    with planted(scene, functools.partial(_restore_nothing, name=lose)):
        scene.run.actor.load_checkpoint(folder)
    yield


def _restore_nothing(worker: Any, name: str) -> None:
    from rlmath.checkpoint import state

    if name == "load_optimizer_state":
        lose_the_moments(worker)
    else:
        begin_the_schedule_again(worker)
    replace(worker, state, name, lambda _: lambda *_: None)


@contextlib.contextmanager
def exported(scene: Scene) -> Iterator[None]:
    """The exported folder has k for v and v for k in one layer."""
    from safetensors.torch import load_file, save_file

    from rlmath.training.summary import check_export

    folder = Path(scene.folder, "exported")
    scene.run.sampling.pool.sleep()
    scene.run.actor.save_hf(folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [n for n in tensors if n.endswith("layers.0.self_attn.k_proj.weight")]:
            other = name.replace("k_proj", "v_proj")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    check_export(scene.run, folder, None)
    yield


# -- where a fault does not apply ---------------------------------------------------------------


def _unknown_advantages(config: Config) -> str | None:
    algorithm = config.algorithm
    if algorithm.advantage not in ESTIMATORS:
        return f"algorithm.advantage={algorithm.advantage}: rewards alone do not give advantages"
    if algorithm.distill_coef or (algorithm.kl_coef and algorithm.kl_in is KlPlace.reward):
        return "something is added to the advantage of each token"
    return None


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


def _no_data_parallel(config: Config) -> str | None:
    if (config.actor.data_parallel or 1) > 1:
        return None
    return "actor.data_parallel=1: there is one data-parallel rank"


def _summed_in_pass(config: Config) -> str | None:
    if config.actor.overlap_gradients:
        return "actor.overlap_gradients=true: no gradient is there before the sum over ranks"
    return None


def _constant(config: Config) -> str | None:
    # A drill has no warm-up.
    if config.actor.optimizer.schedule is Schedule.constant:
        return "actor.optimizer.schedule=constant: it has no place"
    return None


def _no_k(config: Config) -> str | None:
    if is_latent(config.model.path):
        return "latent attention: there is no k_proj"
    return None


OWN = "check: advantages recomputed from rewards"
UPDATE = "check: Adam's step recomputed"
SHARES = "check: shares of the gradient"
FOLLOW = "do not follow from their rewards"
OPPOSITE = "All have the opposite sign"


def of_advantages(name: str, what: str, where: str, plant: Plant, says: str = FOLLOW) -> Fault:
    """A fault of advantages that rewards give."""
    return Fault(name, what, where, OWN, says, plant, missing=_unknown_advantages)


FAULTS = (
    of_advantages(
        "negated_in_driver",
        "the driver's advantages have the opposite sign",
        "driver",
        functools.partial(in_batch, name="sequence_advantages", make=negated),
        OPPOSITE,
    ),
    of_advantages(
        "negated_on_ranks",
        "the ranks' advantages have the opposite sign",
        "ranks",
        functools.partial(planted, plant=negate_on_ranks),
        OPPOSITE,
    ),
    of_advantages(
        "shifted_advantages",
        f"each token has the advantage of one {SHIFT} tokens before it",
        "ranks",
        functools.partial(planted, plant=shift_on_ranks),
    ),
    of_advantages(
        "next_group",
        "each group's last sample counts in the next group",
        "driver",
        functools.partial(in_batch, name="sequence_advantages", make=in_next_group),
    ),
    of_advantages(
        "moved_rewards",
        "each sample has the reward of the one before it",
        "driver",
        functools.partial(in_batch, name="estimator_rewards", make=moved_on),
    ),
    Fault(
        "another_text",
        "each sample has the grade of the next one's text",
        "driver",
        "check: a sample is graded again",
        "another text was graded",
        another_text,
    ),
    Fault(
        "lost_end",
        "responses lose their end-of-sequence token",
        "driver",
        "check: ends of responses",
        "the end-of-sequence token was lost",
        lost_ends,
    ),
    Fault(
        "rank_twice",
        "a data-parallel rank trains the sequences of another",
        "driver",
        "check: every sequence once",
        "were trained on more than once",
        shard_of_another_rank,
        missing=_no_data_parallel,
    ),
    Fault(
        "no_gradient",
        "the first micro-batch has no gradient",
        "ranks",
        "check: gradients of each sequence",
        "are not those of their advantages|gradient of exactly 0|gradient norm is exactly 0",
        functools.partial(planted, plant=drop_a_gradient),
    ),
    Fault(
        "no_kl",
        "the KL term is measured, but not in the loss",
        "ranks",
        "check: the loss is the sum of its terms",
        "the KL term is missing",
        functools.partial(planted, plant=drop_the_kl),
        missing=_no_kl,
    ),
    Fault(
        "entropy_sign",
        "the entropy bonus has the opposite sign",
        "ranks",
        "check: the loss is the sum of its terms",
        "the entropy bonus has the opposite sign",
        functools.partial(planted, plant=turn_the_entropy),
        missing=_no_entropy,
    ),
    Fault(
        "moving_reference",
        "the frozen reference moves",
        "ranks",
        "check: frozen weights",
        "weights that are frozen have changed: .*reference model",
        functools.partial(moving, plant=move_the_reference),
        missing=_no_reference,
    ),
    Fault(
        "moving_base",
        "the base model under LoRA moves",
        "ranks",
        "check: frozen weights",
        "weights that are frozen have changed: .*base model",
        functools.partial(moving, plant=move_the_base),
        missing=_no_lora,
    ),
    Fault(
        "triple_rate",
        "Adam steps at three times the scheduled learning rate",
        "ranks",
        UPDATE,
        "did not take Adam's step",
        functools.partial(planted, plant=triple_the_rate),
    ),
    Fault(
        "zeroed_moments",
        "Adam's moments are 0 before each step",
        "ranks",
        UPDATE,
        "Adam's first moment",
        functools.partial(planted, plant=zero_the_moments),
    ),
    Fault(
        "lost_moments",
        "Adam's moments are lost once",
        "ranks",
        UPDATE,
        "Adam's first moment is not what the last step left",
        functools.partial(planted, plant=lose_the_moments),
        latest=2,
    ),
    Fault(
        "schedule_again",
        "the learning-rate schedule begins again",
        "ranks",
        "check: the schedule's learning rate",
        "the schedule was changed or began again",
        functools.partial(planted, plant=begin_the_schedule_again),
        missing=_constant,
    ),
    Fault(
        "no_sum",
        "gradients are not summed over data-parallel ranks",
        "ranks",
        SHARES,
        "is not the sum over micro-batches|holds other weights than rank 0",
        functools.partial(planted, plant=sum_nothing),
        missing=_no_data_parallel,
    ),
    Fault(
        "no_layer_gradient",
        "one matrix gets no gradient, and moves on by Adam's moments",
        "ranks",
        SHARES,
        "adds nothing to it",
        functools.partial(planted, plant=drop_a_layers_gradient),
    ),
    Fault(
        "no_share_of_layer",
        "one matrix gets no gradient from the first micro-batch",
        "ranks",
        SHARES,
        "adds nothing to it",
        functools.partial(planted, plant=drop_a_layers_micro_batch),
    ),
    Fault(
        "no_rank_gradient",
        "a data-parallel rank's gradient is lost before the sum over ranks",
        "ranks",
        SHARES,
        "is not the sum over micro-batches|the gradient norm is exactly 0",
        functools.partial(planted, plant=drop_a_ranks_gradient),
        missing=_summed_in_pass,
    ),
    Fault(
        "resumed_optimizer",
        "a resume does not restore the optimizer's state",
        "ranks",
        "check: checksums of the checkpoint",
        "state was not restored as it was saved",
        functools.partial(resumed, lose="load_optimizer_state"),
        latest=2,
    ),
    Fault(
        "resumed_schedule",
        "a resume does not restore the schedule",
        "ranks",
        "check: checksums of the checkpoint",
        "step of the learning-rate schedule",
        functools.partial(resumed, lose="load_schedule_state"),
        latest=2,
    ),
    Fault(
        "exported_k_v",
        "the export has k for v in one layer",
        "driver",
        "check: the export's tensors",
        "the exported model is not the trained one.* differs",
        exported,
        missing=_no_k,
    ),
)
