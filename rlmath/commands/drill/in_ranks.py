"""Faults in the Megatron ranks. A function that a rank runs gets its worker as the argument."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlmath.algorithms.advantages import needs_value_model
from rlmath.commands.drill.fault import Fault, Scene, patch, scene_fault, sentence
from rlmath.config.lora import LoraRollout
from rlmath.config.schema import Config

# Attribute of a worker with the originals that were replaced.
_KEPT = "_replaced_by_drill"
STALE = r"holds other weights than the trainer sent|mean exp\|logp"
FAULTS: list[Fault] = []
# Plants a fault in the worker of a rank.
RankPlant = Callable[[Any], None]


@contextlib.contextmanager
def plant_in_ranks(scene: Scene, plant: RankPlant) -> Iterator[None]:
    """Run ``plant(worker)`` in every rank, and restore the originals afterwards."""
    scene.run.actor.call(plant)
    try:
        yield
    finally:
        scene.run.actor.call(restore)


def rank_fault(
    faults: list[Fault], name: str, alarm: str, says: str, around: Any = plant_in_ranks, **more: Any
) -> Callable[[RankPlant], RankPlant]:
    """Register a function that plants a fault in a rank; see ``fault.scene_fault``."""

    def register(plant: RankPlant) -> RankPlant:
        own = functools.partial(around, plant=plant)
        faults.append(Fault(name, sentence(plant), "ranks", alarm, says, own, **more))
        return plant

    return register


def replace(worker: Any, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of a method of an object, or of a module's class."""
    original = getattr(owner, name)
    own = owner.__dict__.get(name)
    worker.__dict__.setdefault(_KEPT, []).append((owner, name, own))
    setattr(owner, name, make(original))


def wrap(worker: Any, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put ``change(original, *arguments)`` in the place of a method or a function."""
    replace(worker, owner, name, lambda original: functools.partial(change, original))


def restore(worker: Any) -> None:
    """Restore the originals; where an object had none, its class's method applies again."""
    for owner, name, own in reversed(worker.__dict__.pop(_KEPT, [])):
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


# -- where a fault does not apply ---------------------------------------------------------------


def _frozen_layer(config: Config) -> str | None:
    """Under LoRA a layer without adapters does not change."""
    layers = config.actor.lora.layers
    if config.actor.lora.rank and layers is not None and 0 not in layers:
        return f"actor.lora.layers={layers}: layer 0 has no adapter and is frozen on purpose"
    return None


def _needs_merged(config: Config) -> str | None:
    """No k and v are sent."""
    if config.actor.lora.rollout is LoraRollout.merged:
        return None
    return "actor.lora.rollout=unmerged: a sync sends adapters alone"


def _no_tensor_parallel(config: Config) -> str | None:
    if config.actor.tensor_parallel == 1:
        return "actor.tensor_parallel=1: there is one tensor rank"
    return _frozen_layer(config)


def _no_value_model(config: Config) -> str | None:
    if needs_value_model(config.algorithm.advantage):
        return None
    return f"algorithm.advantage={config.algorithm.advantage}: there is no value model"


# -- what is sent -------------------------------------------------------------------------------


@rank_fault(FAULTS, "stale_weights", "fingerprints after the weight sync", STALE)
def send_old_weights(worker: Any) -> None:
    """The sync sends the weights of an earlier version."""
    worker.actor.load_parameters()
    parameters = list(worker.actor.module.parameters())
    old = [one.detach().clone() for one in parameters]
    _sending(worker, parameters, lambda: old)


@rank_fault(
    FAULTS, "swapped_k_v", "fingerprints after the weight sync", STALE, missing=_needs_merged
)
def swap_k_and_v(worker: Any) -> None:
    """K and v are swapped in the sync."""
    spec = worker.actor.spec
    # Rows of a group: its queries and their gates, key, value; of latent attention, a head's two.
    gates = 2 if spec.family.gated_attention else 1
    per_group, width = gates * spec.heads // spec.kv_heads + 2, spec.head_dim
    if spec.latent is not None:
        per_group, width = 2, spec.latent.content_dim
    named = worker.actor.module.named_parameters()
    # A stage may have linear attention alone.
    parameters = [p for name, p in named if _has_k_and_v(name)]

    def swap(one: Any) -> Any:
        groups = one.detach().view(-1, per_group, width, *one.shape[1:])
        order = [*range(per_group - 2), per_group - 1, per_group - 2]
        return groups[:, order].reshape(one.shape).clone()

    _sending(worker, parameters, lambda: [swap(one) for one in parameters])


def _has_k_and_v(name: str) -> bool:
    matrix = "linear_qkv" in name or "linear_kv_up_proj" in name
    return matrix and name.endswith((".weight", ".bias")) and "norm" not in name


def _sending(worker: Any, parameters: Sequence[Any], values: Callable[[], Sequence[Any]]) -> None:
    """Send other values of some parameters."""
    import torch

    @torch.no_grad()
    def sending(send: Callable[[int], None], version: int) -> None:
        own = [one.detach().clone() for one in parameters]
        for one, value in zip(parameters, values(), strict=True):
            one.copy_(value)
        send(version)
        for one, value in zip(parameters, own, strict=True):
            one.copy_(value)

    wrap(worker, worker.connection, "send_weights", sending)


def leave_out_a_tensor(worker: Any) -> None:
    """The last tensor of the first bucket of each sync is not announced."""
    from rlmath.engines.transports import shared_memory

    first: list[Any] = []

    def without(contents: Callable[..., Any], bucket: Any, segment: int) -> dict[str, Any]:
        message: dict[str, Any] = contents(bucket, segment)
        first[:] = first or [bucket]
        if bucket is not first[0]:
            return message
        return message | {key: of[:-1] for key, of in message.items() if isinstance(of, list)}

    wrap(worker, shared_memory, "bucket_contents", without)


@scene_fault(
    FAULTS,
    "unsent_tensor",
    "error of the weight sync, with the tensor's name",
    r"the weight update left .* which the actor did not send",
    where="ranks",
)
def unsent_tensor(scene: Scene) -> Iterator[None]:
    """The sync leaves out a tensor."""
    try:
        with plant_in_ranks(scene, leave_out_a_tensor):
            yield
    finally:
        scene.run.sampling.pool.call_workers(end_update)


def end_update(worker: Any) -> None:
    """Runs in a vLLM worker, which refuses to begin an update while one has not ended."""
    own = worker.worker  # vLLM's wrapper forwards reads and keeps writes.
    if own._weight_update_active:
        own.weight_transfer_engine.reset_weight_update_target()
        own._weight_update_active = False


# -- the update ---------------------------------------------------------------------------------


@rank_fault(
    FAULTS,
    "frozen_layer",
    "invariant: every matrix changes on every rank",
    r"did not change a single bit of .*layers\.0\.",
    missing=_frozen_layer,
)
def freeze_a_layer(worker: Any) -> None:
    """One layer is never updated."""
    if worker.actor.parallel.pp_rank == 0:
        keep_weights(worker, worker.actor, lambda name: ".layers.0." in name)


@rank_fault(
    FAULTS,
    "frozen_value_layer",
    "invariant: every matrix of the value model changes",
    r"did not change a single bit of the value model's .*layers\.0\.",
    missing=_no_value_model,
)
def freeze_a_layer_of_values(worker: Any) -> None:
    """One layer of the value model is never updated."""
    if worker.actor.parallel.pp_rank == 0:
        keep_weights(worker, worker.value_model, lambda name: ".layers.0." in name)


@rank_fault(
    FAULTS,
    "half_updated_rank",
    "invariant: every matrix changes on every rank",
    r"did not change a single bit of .* on rank",
    missing=_no_tensor_parallel,
)
def half_update(worker: Any) -> None:
    """One tensor-parallel rank misses the update of every second layer."""
    if worker.actor.parallel.tp_rank == worker.actor.layout.tensor_parallel - 1:
        keep_weights(
            worker, worker.actor, lambda name: ".layers.0." in name or ".layers.2." in name
        )


def keep_weights(worker: Any, model: Any, chosen: Callable[[str], bool]) -> None:
    """Take back what each update makes of a model's parameters, by their names."""
    import torch

    parameters = [p for name, p in model.module.named_parameters() if chosen(name)]
    assert parameters, "the rank has no such layer"

    @torch.no_grad()
    def finishing(finish: Callable[[bool], float], discard: bool) -> float:
        model.load_parameters()
        before = [one.detach().clone() for one in parameters]
        lr = finish(discard)
        model.load_parameters()
        for one, value in zip(parameters, before, strict=True):
            one.copy_(value)
        return lr

    wrap(worker, model, "finish_minibatch", finishing)


# -- the batch ----------------------------------------------------------------------------------


def lose_the_mask(worker: Any) -> None:
    """All response tokens are in the loss."""

    def change(shard: Any) -> Any:
        import torch

        return shard.with_values(loss_mask=torch.ones_like(shard.batch.loss_mask))

    _change_shards(worker, change)


@rank_fault(
    FAULTS,
    "denominator",
    "invariant: sums of the loss weights",
    "the loss has a different denominator",
)
def divide_by_all_tokens(worker: Any) -> None:
    """The loss is divided by prompt + response tokens."""

    def change(shard: Any) -> Any:
        batch = shard.batch
        share = float(batch.response_lengths.sum() / batch.sequence_lengths.sum())
        return dataclasses.replace(shard, weights=shard.weights * share)

    _change_shards(worker, change)


def _change_shards(worker: Any, change: Callable[[Any], Any]) -> None:
    """Change the rank's shard of every step. (Ray finds a worker's methods in its class.)"""
    from rlmath.actor import rank_step

    def step_of(step: Any, policy: Any, value_model: Any, shard: Any) -> Any:
        return step(policy, value_model, change(shard))

    wrap(worker, rank_step, "RankStep", step_of)


@scene_fault(
    FAULTS,
    "lost_mask",
    "invariant: tokens in the loss",
    "a loss mask or sequences were lost",
    where="ranks",
)
def lost_mask(scene: Scene) -> Iterator[None]:
    """The ranks lose the loss mask of one sequence."""
    from rlmath.training import step_batch

    def mask(original: Any, *arguments: Any, **options: Any) -> Any:
        sequences = original(*arguments, **options)
        takes_part = sequences.takes_part.clone()
        takes_part[0] = False
        return dataclasses.replace(sequences, takes_part=takes_part)

    with patch(step_batch, "sampled_sequences", mask), plant_in_ranks(scene, lose_the_mask):
        yield
