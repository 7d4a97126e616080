"""Memory of one GPU in each phase of a step, in bytes, term by term.

Weights and activations are bfloat16, gradients and Adam's state float32, as the actor has them.
``activations.py`` has the terms that grow with the micro-batch; this module has the state and the
phases.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlmath.checkpoint.memory import CheckpointBytes, checkpoint_bytes_of_rank
from rlmath.commands.plan.activations import (
    attention_masks_bytes,
    backward_bytes,
    forward_bytes,
    kept_bytes,
    logits_bytes,
)
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.fp8 import weight_copy_bytes
from rlmath.commands.plan.measured import MEASURED
from rlmath.commands.plan.models import (
    adapter_sizes_of_rank,
    expert_parameters_of_rank,
    is_last_stage,
    largest_parameter_of_rank,
    parameters_of_rank,
    telling_stages,
)
from rlmath.config.weights import BUCKET_MIB
from rlmath.engines.transport import shared_buffer_bytes
from rlmath.model.lora import MERGED_ELEMENTS, Lora, adapted_entries, adapter_shapes
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec, padded_vocab_size
from rlmath.weights.pieces import hf_shapes

GIB = 2**30
MIB = 2**20
# CUDA's context, NCCL's buffers and libraries of the actor's process.
ACTOR_PROCESS_GIB = MEASURED["actor_process_gib"]
# Phase in which ranks copy their state to the host, without gradients and activations.
COPYING = "copies to the host"
# Share that is left free for fragmentation.
FREE_SHARE = MEASURED["free_share"]
# Largest share of a GPU that an engine gets.
MOST_OF_ENGINE = 0.85


@dataclass(frozen=True)
class Step:
    """Properties of a step that the actor's memory depends on, beside the layout."""

    microbatches: int  # Micro-batches of an optimizer step on a data-parallel rank.
    longest_tokens: int
    bucket_bytes: int = BUCKET_MIB * MIB
    # A reference model, which the host keeps, changes places with the model's weights.
    reference: bool = False
    value_model: bool = False  # A value model is trained in the same processes.
    lm_head_float32: bool = False  # The output layer multiplies in float32.
    whole_logits: bool = False  # All logits of a micro-batch are in memory at once.
    triton_logits: bool = False  # Kernels take their softmax (actor.logits=triton).
    offload: str = "none"  # none, optimizer or all: what goes to host memory while engines sample.
    offload_in_backward: bool = False  # The optimizer's state is on the GPU for its steps alone.
    minibatches: int = 1
    # Tokens of a data-parallel rank's share whose routes the host keeps (actor.routing_replay); 0:
    # none.
    replayed_tokens: int = 0
    sampled_routes: bool = False  # Samples carry routes as well (actor.routing_replay=engine).
    quantized: bool = False  # Engines have the matrices of layers in FP8.


@dataclass(frozen=True)
class StateBytes:
    weights: float  # In bfloat16.
    gradients: float  # In float32.
    optimizer: float  # Float32 main parameters and Adam's moments, shared by the copies.

    @property
    def whole(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def resident(self, offload: str) -> float:
        """Bytes on the device while no phase needs the state."""
        return {"none": self.whole, "optimizer": self.weights, "all": 0.0}[offload]

    def with_weights(self, offload: str) -> float:
        """Bytes on the device while a phase needs the weights."""
        return max(self.weights, self.resident(offload))

    @property
    def without_optimizer(self) -> float:
        return self.weights + self.gradients

    def copied_bytes(self, offload: str) -> float:
        """Bytes in host memory; gradients, which are zero between updates, are only freed."""
        weights = self.weights if offload == "all" else 0.0
        return 0.0 if offload == "none" else self.optimizer + weights

    def moved_bytes(self, step: Step) -> float:
        """Bytes that move to host memory and back in a step."""
        again = step.minibatches - 1 if step.offload_in_backward else 0
        return self.copied_bytes(step.offload) + again * self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class Phase:
    name: str
    terms: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.terms.values())

    def describe(self) -> str:
        parts = " + ".join(f"{size / GIB:.1f} {name}" for name, size in self.terms.items())
        return f"{self.name} {self.num_bytes / GIB:.1f} GiB = {parts}"


def state_bytes(parameters: int, dp: int) -> StateBytes:
    """Weights, gradients and Adam's state of a rank.

    ``6 + 12/d`` bytes a parameter: Megatron-core's table for bfloat16 parameters and float32
    gradients with its distributed optimizer ("Distributed Optimizer", developer guide), which is
    ZeRO's first stage (Rajbhandari et al. 2020, section 5.1).
    """
    return StateBytes(2 * parameters, 4 * parameters, parameters * 12 / dp)


def model_state_bytes(spec: ModelSpec, actor: ActorShape, stage: int) -> StateBytes:
    """State of a rank of a stage; experts have their own copies."""
    layout = actor.layout
    dense = parameters_of_rank(spec, layout, stage)
    experts = expert_parameters_of_rank(spec, layout, stage)
    if actor.lora is not None:
        frozen = StateBytes(2 * (dense + experts), 0.0, 0.0)
        shared, own = (
            sum(adapter_sizes_of_rank(spec, layout, stage, actor.lora, of_experts))
            for of_experts in (False, True)
        )
        return frozen + state_bytes(shared, layout.copies) + state_bytes(own, layout.expert_copies)
    return state_bytes(dense, layout.copies) + state_bytes(experts, layout.expert_copies)


def trained_parameters(spec: ModelSpec, actor: ActorShape, stage: int) -> int:
    """Parameters that a rank of a stage trains: adapters, or all of its weights."""
    if actor.lora is None:
        return rank_parameters(spec, actor, stage)
    return sum(_adapter_sizes(spec, actor.layout, stage, actor.lora))


def _adapter_sizes(spec: ModelSpec, layout: Layout, stage: int, lora: Lora) -> tuple[int, ...]:
    """Sizes of the parameters of a rank's adapters, those of experts among them."""
    shared = adapter_sizes_of_rank(spec, layout, stage, lora)
    return shared + adapter_sizes_of_rank(spec, layout, stage, lora, of_experts=True)


def value_state_bytes(spec: ModelSpec, actor: ActorShape, stage: int) -> StateBytes:
    """State of a value model's rank: the same stage without the output layer."""
    layout = actor.layout
    tp = layout.tensor_parallel
    # All of its weights are trained.
    policy = model_state_bytes(spec, dataclasses.replace(actor, lora=None), stage)
    first, last = stage == 0, is_last_stage(layout, stage)
    tied_alone = spec.tied and first and last
    if not last or tied_alone:
        return policy
    table = padded_vocab_size(spec.vocab, tp) // tp * spec.hidden
    less = state_bytes(-table, layout.copies)
    return policy + less


def moved_bytes(spec: ModelSpec, actor: ActorShape, step: Step) -> float:
    """Bytes that a rank of the fullest stage moves to host memory in a step, and back."""
    return max(
        sum(one.moved_bytes(step) for one in _models(spec, actor, step, stage))
        for stage in telling_stages(spec, actor.layout)
    )


def _models(
    spec: ModelSpec, actor: ActorShape, step: Step, stage: int
) -> tuple[StateBytes, StateBytes]:
    """The policy's state on a rank of a stage, and the value model's, nothing if there is none."""
    none = StateBytes(0.0, 0.0, 0.0)
    value = value_state_bytes(spec, actor, stage) if step.value_model else none
    return model_state_bytes(spec, actor, stage), value


def buffer_bytes(spec: ModelSpec, actor: ActorShape, step: Step) -> float:
    """Bytes that stay allocated after the first micro-batch.

    The rotary table of each model in float32; with ``local`` layers the buffer that sequence
    parallelism gathers into.
    """
    width = spec.head_dim if spec.latent is None else spec.rotary_dim
    rotary = (2 if step.value_model else 1) * 4 * step.longest_tokens * width
    gathered = actor.layout.tensor_parallel > 1 and actor.layers == "local"
    return rotary + (2 * actor.in_forward.tokens * spec.hidden if gathered else 0)


def stage_phases(spec: ModelSpec, actor: ActorShape, step: Step, stage: int) -> list[Phase]:
    """Phases of a step on a rank of a stage, without CUDA's share."""
    layout = actor.layout
    last = is_last_stage(layout, stage)
    state, value = _models(spec, actor, step, stage)
    trained = trained_parameters(spec, actor, stage)
    in_flight = micro_batches_in_flight(layout, step.microbatches, stage)
    masks = attention_masks_bytes(spec, actor, step.longest_tokens)
    forward_masks = attention_masks_bytes(spec, actor.in_forward, step.longest_tokens)

    # Each phase has loaded what it needs (rlmath/actor/worker.py): log-probs and the weight sync
    # the policy's weights, an update all of its model, and a checkpoint the weights of both.
    idle = (state.resident(step.offload), value.resident(step.offload))
    sampled = (state.with_weights(step.offload), value.resident(step.offload))
    updated = (state.whole, value.resident(step.offload))
    computed = (state.without_optimizer, updated[1]) if step.offload_in_backward else updated
    value_computed = value.without_optimizer if step.offload_in_backward else value.whole
    held = {
        "state": idle,
        "value training": (state.with_weights(step.offload), value_computed),
        "checkpoint": (sampled[0], value.with_weights(step.offload)),
        **dict.fromkeys(("logits", "training"), computed),
        "optimizer step": updated,
        COPYING: (state.weights + state.optimizer, value.resident(step.offload)),
        "value optimizer step": (state.with_weights(step.offload), value.whole),
    }

    def phase(name: str, **terms: float) -> Phase:
        policy_bytes, value_bytes = held.get(name, sampled)
        resident = {
            "state": policy_bytes,
            "value model": value_bytes,
            "buffers": buffer_bytes(spec, actor, step),
            "attention masks": masks if "activations" in terms else 0.0,
        }
        named = {key.replace("_", " "): size for key, size in terms.items()}
        return Phase(name, {k: v for k, v in (resident | named).items() if v})

    copies, both = (
        {"copies in FP8": weight_copy_bytes(spec, actor, stage, backward=backward)}
        for backward in (False, True)
    )

    def backward(name: str) -> Phase:
        return phase(name, **backward_bytes(spec, actor, in_flight, stage), **both)

    def logits(backward: bool) -> float:
        if not last:
            return 0.0
        return logits_bytes(
            spec,
            actor if backward else actor.in_forward,
            backward=backward,
            in_float32=step.lm_head_float32,
            whole=step.whole_logits,
            kernels=step.triton_logits,
        )

    widest = max(forward_bytes(spec, actor.in_forward, stage), logits(backward=False))
    what = "logits" if widest == logits(backward=False) else "layer"
    forward = {what: widest, "attention_masks": forward_masks, **copies}
    phases = [phase("state"), phase("log-probs", **forward)]
    if step.reference:
        phases.append(phase("reference", **forward))
    if last:
        kept = kept_bytes(spec, actor, in_flight, stage)
        phases.append(phase("logits", activations=kept, logits=logits(backward=True), **both))
    phases.append(backward("training"))
    temporaries = optimizer_step_bytes(spec, actor, trained)
    phases.append(phase("optimizer step", temporaries=temporaries))
    if step.value_model:
        phases.append(backward("value training"))
        if step.offload_in_backward:
            phases.append(phase("value optimizer step", temporaries=temporaries))
    buckets = trainer_sync_bytes(spec, actor, step.bucket_bytes)
    phases.append(phase("weight sync", buckets=buckets, merging=merging_bytes(spec, actor)))
    if step.offload != "none":
        phases.append(phase(COPYING))
    saved = checkpoint_bytes(spec, actor, stage)
    phases.append(phase("checkpoint", gathered=saved.gpu_bytes))
    return phases


def micro_batches_in_flight(layout: Layout, microbatches: int, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once, at most.

    One forward, one backward: one for each stage from it to the last (Korthikanti et al.
    2022, section 4.2.3). Interleaved, each of its chunks has a share of a micro-batch: before its
    first backward pass a stage has run twice as many chunks as there are stages behind it, all
    chunks but the last of a round of micro-batches, and one more (Narayanan et al. 2021,
    section 2.2.2; Megatron's ``get_pp_rank_microbatches``).
    """
    pp, virtual = layout.pipeline_parallel, layout.virtual_stages
    if virtual == 1:
        return max(1, min(pp - stage, microbatches))
    chunks = 2 * (pp - stage - 1) + (virtual - 1) * pp + 1
    return min(chunks, microbatches * virtual) / virtual


def rank_parameters(spec: ModelSpec, actor: ActorShape, stage: int) -> int:
    """Weights of a rank of a stage, its experts among them."""
    layout = actor.layout
    dense = parameters_of_rank(spec, layout, stage)
    return dense + expert_parameters_of_rank(spec, layout, stage)


def optimizer_step_bytes(spec: ModelSpec, actor: ActorShape, weights: int) -> float:
    """Adam's temporaries: none with Transformer Engine's fused Adam; with torch's, two of the size
    of the rank's largest piece of a parameter."""
    layout = actor.layout
    pp = layout.pipeline_parallel
    if actor.layers != "local":
        return 0.0
    if actor.lora is not None:
        stages = telling_stages(spec, layout)
        sizes = (_adapter_sizes(spec, layout, stage, actor.lora) for stage in stages)
        return 8 * min(weights / layout.copies, max(map(max, filter(None, sizes)), default=0))
    largest = largest_parameter_of_rank(spec, layout)
    if actor.overlap_gradients or (spec.tied and pp > 1):
        largest //= layout.copies  # The shared table is a separate bucket, which the copies divide.
    return 8 * min(weights / layout.copies, largest)


def trainer_sync_bytes(spec: ModelSpec, actor: ActorShape, bucket_bytes: int) -> int:
    """Buffers of a trainer rank in a weight sync over ``ipc``, at the worst of its buckets.

    ``rlmath.engines.transport`` bounds it as if each piece were as large as the largest tensor.
    Here each bucket counts with its size: while vLLM reads one, the next is gathered, with its
    messages if several ranks share the model. vLLM's buffer has the size of the largest bucket, and
    vLLM keeps the last tensor.
    """
    layout = actor.layout
    tp, pp, ep = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
    return _sync_peak(spec, actor.engine_adapters, bucket_bytes, tp * pp * ep > 1)


def merging_bytes(spec: ModelSpec, actor: ActorShape) -> float:
    """Bytes for merging a matrix with its adapter: the result, and rows of it in float32.

    ``rlmath.actor.lora.Adapter.merge``.
    """
    if actor.lora is None or actor.unmerged:
        return 0.0
    layout = actor.layout
    largest = _largest_adapted(
        spec, actor.lora, layout.tensor_parallel, layout.expert_tensor_parallel
    )
    return 2 * largest + 8 * min(MERGED_ELEMENTS, largest)


@functools.cache
def _largest_adapted(spec: ModelSpec, lora: Lora, tp: int, expert_tp: int) -> int:
    """Elements that a rank has of the largest matrix with an adapter."""
    return max(
        math.prod(spec.size(dim) for dim in tensor.dims) // (expert_tp if entry.per_expert else tp)
        for entry, layer in adapted_entries(spec, lora)
        for tensor in entry.hf
        if lora.adapts(tensor.name.format(layer=layer, expert=0))
    )


@functools.cache  # A search asks thousands of times.
def _sync_peak(spec: ModelSpec, lora: Lora | None, bucket_bytes: int, several: bool) -> int:
    shapes = hf_shapes(spec) if lora is None else adapter_shapes(spec, lora)
    sizes = [2 * math.prod(size) for size in shapes.values()]
    buckets: list[list[int]] = []
    for size in sizes:
        # The first bucket is an eighth, see rlmath.weights.buckets.
        limit = bucket_bytes if len(buckets) > 1 else bucket_bytes // 8
        if not buckets or sum(buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(size)
    most = last = 0
    for bucket, following in itertools.zip_longest(buckets, buckets[1:], fillvalue=[0]):
        most = max(most, sum(bucket) + (2 if several else 1) * sum(following) + last)
        last = bucket[-1]
    return most + shared_buffer_bytes(bucket_bytes, max(sizes))


def largest_tensor_bytes(spec: ModelSpec) -> int:
    """Largest of the tensors that a weight sync sends."""
    query = spec.heads * spec.head_dim if spec.latent is None else spec.value_width
    return 2 * spec.hidden * max(spec.vocab, spec.ffn, query)


def checkpoint_bytes(
    spec: ModelSpec, actor: ActorShape, stage: int, *, background: bool = False
) -> CheckpointBytes:
    """Bytes that a rank takes to save its share of a checkpoint; experts are a separate part."""
    layout = actor.layout
    if actor.lora is not None:
        parts = [
            checkpoint_bytes_of_rank(
                sum(sizes), copies, max(sizes, default=0), background=background
            )
            for sizes, copies in (
                (adapter_sizes_of_rank(spec, layout, stage, actor.lora), layout.copies),
                (
                    adapter_sizes_of_rank(spec, layout, stage, actor.lora, of_experts=True),
                    layout.expert_copies,
                ),
            )
            if sizes
        ]
        return CheckpointBytes(
            max((one.gpu_bytes for one in parts), default=0), sum(one.host_bytes for one in parts)
        )
    largest = largest_parameter_of_rank(spec, layout)
    dense = parameters_of_rank(spec, layout, stage)
    one = checkpoint_bytes_of_rank(dense, layout.copies, largest, background=background)
    experts = expert_parameters_of_rank(spec, layout, stage)
    if not experts:
        return one
    largest = 2 * spec.hidden * spec.moe_ffn
    two = checkpoint_bytes_of_rank(experts, layout.expert_copies, largest, background=background)
    return CheckpointBytes(max(one.gpu_bytes, two.gpu_bytes), one.host_bytes + two.host_bytes)


def host_bytes(spec: ModelSpec, actor: ActorShape, step: Step, ranks_of_node: int) -> float:
    """Host memory that a node's ranks take for tensors: a checkpoint, a reference model, what is
    offloaded, and routes."""
    layout = actor.layout
    pp = layout.pipeline_parallel
    most = 0.0
    for stage in range(pp):
        saved = checkpoint_bytes(spec, actor, stage, background=True).host_bytes
        # Without its adapters the policy is the reference.
        reference = 0 if actor.lora else 2 * rank_parameters(spec, actor, stage)
        moved = sum(one.copied_bytes(step.offload) for one in _models(spec, actor, step, stage))
        kept = (reference if step.reference else 0) + route_bytes(spec, actor, step, stage)
        most = max(most, saved + moved + kept)
    return ranks_of_node * most + sampled_route_bytes(spec, actor, step, ranks_of_node)


def route_bytes(spec: ModelSpec, actor: ActorShape, step: Step, stage: int) -> float:
    """Routes that a rank of a stage keeps in host memory from the old-log-prob pass to the update.

    A number for each token, MoE layer and expert of a token (``rlmath.actor.routing_replay``);
    tensor ranks have a share of the tokens each.
    """
    layers = actor.layout.stage_layers(spec.layers, stage)
    routes = step.replayed_tokens * _route_bytes_of_token(spec, layers)
    return routes / actor.layout.tensor_parallel


def sampled_route_bytes(
    spec: ModelSpec, actor: ActorShape, step: Step, ranks_of_node: int
) -> float:
    """Routes of a step's samples in host memory of the driver's node, of all layers.

    The driver has those of all samples three times: as they came, in the shards that ranks read,
    and in the batch that is kept for ``rlmath replay``. Each rank of the node lays out those of
    its tokens.
    """
    if not step.sampled_routes:
        return 0.0
    layout = actor.layout
    of_share = step.replayed_tokens * _route_bytes_of_token(spec, range(spec.layers))
    return (3 * layout.data_parallel + ranks_of_node / layout.tensor_parallel) * of_share


def _route_bytes_of_token(spec: ModelSpec, layers: Iterable[int]) -> int:
    choices = sum(map(spec.is_moe_layer, layers)) * spec.experts_per_token
    return choices * (1 if spec.experts <= 256 else 2)


def actor_phases(spec: ModelSpec, actor: ActorShape, step: Step) -> list[Phase]:
    """The phases of the actor, each on the stage where it is fullest, with its process."""
    layout = actor.layout
    fullest: dict[str, Phase] = {}
    for stage in telling_stages(spec, layout):
        for phase in stage_phases(spec, actor, step, stage):
            known = fullest.get(phase.name)
            if known is None or phase.num_bytes > known.num_bytes:
                fullest[phase.name] = phase
    process = {"process": ACTOR_PROCESS_GIB * GIB}
    return [Phase(one.name, process | dict(one.terms)) for one in fullest.values()]


def usable_bytes(gpu_gib: float) -> float:
    """A GPU's memory without the share that is left free."""
    return gpu_gib * GIB * (1 - FREE_SHARE)


def engine_share(gpu_gib: float, resident_bytes: float) -> float:
    """``rollout.gpu_memory_utilization``: the share left by the actor, in whole hundredths."""
    left = usable_bytes(gpu_gib) - resident_bytes
    return min(MOST_OF_ENGINE, math.floor(100 * left / (gpu_gib * GIB)) / 100)
