"""What one GPU holds in each phase of a step, in bytes, term by term.

Weights and activations are bfloat16, gradients and Adam's state float32, as the actor has them.
The terms are counted from tensors, after Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models"), section 4, whose layer has dropout masks, attention
that stores its scores, and a feed-forward of two matrices. Ours has no masks, keeps one float32 per
head and token in the place of scores (flash attention, Dao et al. 2022), and has a third matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlmath.config.schema import RolloutConfig
from rlmath.planning.models import (
    expert_parameters_of_rank,
    mixture_layers,
    parameters_of_rank,
)
from rlmath.weights.shape import ModelShape, padded_vocab_size

GIB = 2**30
MIB = 2**20
# Rows whose softmax is in float32 at once: rlmath.actor.logprobs.ROWS_PER_CHUNK, which imports
# torch; a test holds the two together.
SOFTMAX_ROWS = 2048
# CUDA's context, NCCL's buffers and libraries of the actor's process. Assumed.
ACTOR_PROCESS_GIB = 2.0
# The same of an engine that sleeps, with its CUDA graphs. Assumed.
ENGINE_PROCESS_GIB = 2.5
# Tokens that vLLM reads in one step.
ENGINE_STEP_TOKENS = RolloutConfig.max_batched_tokens
# Left free: what the allocator loses in pieces.
FREE_SHARE = 0.05


@dataclass(frozen=True)
class ActorShape:
    """How the actor is laid out.

    Attributes:
        tp: Tensor-parallel ranks; with more than one, activations are split along the sequence
            where matrices are not (``actor.sequence_parallel``).
        pp: Pipeline stages.
        dp: Copies of the model, which share the optimizer's state.
        recompute_layers: Layers of each stage that keep their input alone.
        max_tokens: Longest micro-batch, over its context ranks.
        cp: Context-parallel ranks, which share a micro-batch's tokens.
        ep: Expert-parallel ranks, which share the experts of a mixture; 1: tensor ranks cut them.
    """

    tp: int
    pp: int
    dp: int
    recompute_layers: int
    max_tokens: int
    cp: int = 1
    ep: int = 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights, experts apart."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.copies if self.ep == 1 else self.tp * self.copies // self.ep

    @property
    def tokens(self) -> int:
        """Of the longest micro-batch on one rank."""
        return -(-self.max_tokens // self.cp)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.copies

    def __str__(self) -> str:
        more = f" x CP {self.cp}" * (self.cp > 1) + f" x DP {self.dp}"
        return f"actor TP {self.tp} x PP {self.pp}{more}" + f", EP {self.ep}" * (self.ep > 1)


@dataclass(frozen=True)
class Phase:
    """One phase: its terms in bytes, by name."""

    name: str
    terms: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.terms.values())

    def describe(self) -> str:
        """The sum, for a message."""
        parts = " + ".join(f"{size / GIB:.1f} {name}" for name, size in self.terms.items())
        return f"{self.name} {self.num_bytes / GIB:.1f} GiB = {parts}"


def state_bytes(parameters: int, dp: int) -> float:
    """Weights, gradients and Adam's state of a rank.

    ``6 + 12/d`` bytes a parameter: Megatron-core's table for bfloat16 parameters and float32
    gradients with its distributed optimizer ("Distributed Optimizer", developer guide), which is
    ZeRO's first stage (Rajbhandari et al. 2020, section 5.1).
    """
    return parameters * (6 + 12 / dp)


def model_state_bytes(shape: ModelShape, actor: ActorShape, *, first: bool, last: bool) -> float:
    """State of a rank of a stage; experts have copies of their own."""
    dense = parameters_of_rank(shape, actor.tp, actor.pp, first=first, last=last)
    experts = expert_parameters_of_rank(shape, actor.tp, actor.pp, actor.ep)
    return state_bytes(dense, actor.copies) + state_bytes(experts, actor.expert_copies)


def worst_state_bytes(shape: ModelShape, actor: ActorShape) -> float:
    """State of the fullest stage."""
    ends = [(stage == 0, stage == actor.pp - 1) for stage in {0, actor.pp - 1}]
    return max(model_state_bytes(shape, actor, first=first, last=last) for first, last in ends)


def layer_bytes(shape: ModelShape, tp: int) -> float:
    """Activations that a layer keeps for its backward pass, per token of the micro-batch.

    Two bytes for each of: the inputs of both norms and their outputs (4 h); queries, keys and
    values in one matrix, whole, because values are a view of it (q + 2 k); rotated queries and
    keys (q + k); attention's output (q); gate and up (2 f), their product (f). Four for the log of
    attention's denominator per head. All are split over tensor ranks, the first four along the
    sequence (Korthikanti et al. 2022, eq. 4). A norm of queries and keys keeps its inputs as well.
    Of a mixture: each token's copies for its experts and what these give (h each), their gate, up
    and product (3 m), and the router's scores and weights in float32.

    Returns:
        The mean over the model's layers.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths: float = 4 * shape.hidden + 3 * query + 3 * key
    if shape.qk_norm:
        widths += query + key
    share = mixture_layers(shape) / shape.layers
    mixture = shape.experts_per_token * (2 * shape.hidden + 3 * shape.moe_ffn)
    widths += (1 - share) * 3 * shape.ffn + share * mixture
    return (2 * widths + 4 * shape.heads + share * 8 * shape.experts) / tp


def feed_forward_width(shape: ModelShape) -> int:
    """Widest of what a token meets in one layer's feed-forward."""
    mixtures = mixture_layers(shape)
    dense = shape.ffn if mixtures < shape.layers else 0
    return max(dense, shape.experts_per_token * shape.moe_ffn if mixtures else 0)


def kept_bytes(shape: ModelShape, actor: ActorShape, in_flight: int) -> float:
    """Activations of the micro-batches that a stage has in flight.

    A recomputed layer keeps its input, 2 h bytes a token (the same paper, section 5).
    """
    layers = shape.layers // actor.pp
    whole = (layers - actor.recompute_layers) * layer_bytes(shape, actor.tp)
    inputs = actor.recompute_layers * 2 * shape.hidden / actor.tp
    return in_flight * actor.tokens * (whole + inputs)


def logits_bytes(shape: ModelShape, actor: ActorShape, *, backward: bool) -> float:
    """Logits of a micro-batch on the last stage, and what the log-probs take beside them.

    ``rlmath/actor/logprobs.py``: the rank's slice of the vocabulary in bfloat16, in the backward
    pass its gradient too; of a chunk of rows 4 tables in float32 forward, 6 backward.
    """
    width = padded_vocab_size(shape.vocab, actor.tp) // actor.tp
    rows = min(SOFTMAX_ROWS, actor.tokens)
    tables, temporaries = (2, 6) if backward else (1, 4)
    return width * (2 * tables * actor.tokens + 4 * temporaries * rows)


def backward_bytes(shape: ModelShape, actor: ActorShape) -> float:
    """What the backward pass of one layer takes beside what was kept.

    A recomputed layer's activations; the gradients of gate and up and of two hidden states, and the
    input that sequence parallelism gathers again; the largest gradient of a matrix before it is
    added to the float32 buffer.
    """
    again = layer_bytes(shape, actor.tp) if actor.recompute_layers else 0.0
    gathered = 2 * shape.hidden if actor.tp > 1 else 0
    gradients = 4 * feed_forward_width(shape) / actor.tp + 4 * shape.hidden
    matrix = 2 * shape.hidden * max(2 * shape.ffn, shape.vocab) / actor.tp
    return actor.tokens * (again + gathered + gradients) + matrix


def forward_bytes(shape: ModelShape, actor: ActorShape) -> float:
    """The widest place of a forward pass that keeps nothing: the feed-forward."""
    return actor.tokens * (6 * shape.hidden + 6 * feed_forward_width(shape) / actor.tp)


def actor_phases(shape: ModelShape, actor: ActorShape, microbatches: int) -> list[Phase]:
    """Log-probs, logits and backward pass of the actor, each on the stage where it is worst.

    Args:
        microbatches: Of an optimizer step on a data-parallel rank; no more are in flight.
    """
    pp = actor.pp
    first = model_state_bytes(shape, actor, first=True, last=pp == 1)
    last = model_state_bytes(shape, actor, first=pp == 1, last=True)
    # One micro-batch forward, one backward: the first stage has as many in flight as there are
    # stages (the same paper, section 4.2.3), the last has one.
    in_flight = max(1, min(pp, microbatches))

    def phase(name: str, state: float, **terms: float) -> Phase:
        process = {"process": ACTOR_PROCESS_GIB * GIB, "state": state}
        return Phase(name, process | {key.replace("_", " "): size for key, size in terms.items()})

    def backward(state: float, in_flight: int) -> Phase:
        return phase(
            "training",
            state,
            activations=kept_bytes(shape, actor, in_flight),
            backward_of_a_layer=backward_bytes(shape, actor),
        )

    return [
        phase(
            "log-probs",
            last,
            layer=forward_bytes(shape, actor),
            logits=logits_bytes(shape, actor, backward=False),
        ),
        phase(
            "logits",
            last,
            activations=kept_bytes(shape, actor, 1),
            logits=logits_bytes(shape, actor, backward=True),
        ),
        max(backward(first, in_flight), backward(last, 1), key=lambda one: one.num_bytes),
    ]


def engine_weights_bytes(shape: ModelShape, tp: int) -> float:
    """Weights of one rank of an engine."""
    dense = parameters_of_rank(shape, tp, 1, first=True, last=True)
    return 2 * (dense + expert_parameters_of_rank(shape, tp, 1, 1))


def kv_bytes(shape: ModelShape, tp: int) -> float:
    """Keys and values of one token on one rank of an engine; ranks beyond the heads hold copies."""
    return 2 * 2 * shape.layers * max(1.0, shape.kv_heads / tp) * shape.head_dim


def engine_step_bytes(shape: ModelShape, tp: int, running: int) -> float:
    """What a step of an engine takes: the widest layer, and logits of each running sequence.

    The sampler has the logits in float32 and three tables like them.
    """
    layer = ENGINE_STEP_TOKENS * (4 * shape.hidden + 6 * feed_forward_width(shape) / tp)
    return layer + running * shape.vocab * 4 * 4


def refit_bytes(shape: ModelShape, bucket_mib: int) -> float:
    """Two buckets; a tensor larger than one travels alone."""
    return 2 * max(bucket_mib * MIB, 2 * shape.vocab * shape.hidden)


def usable_bytes(gpu_gib: float) -> float:
    """A GPU's memory less what is left free."""
    return gpu_gib * GIB * (1 - FREE_SHARE)


def engine_share(gpu_gib: float, resident_bytes: float, most: float = 0.85) -> float:
    """``rollout.gpu_memory_utilization``: what is left beside the actor, in whole hundredths."""
    left = usable_bytes(gpu_gib) - resident_bytes
    return min(most, math.floor(100 * left / (gpu_gib * GIB)) / 100)
