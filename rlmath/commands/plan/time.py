"""How long the phases of a step take, from FLOPs, bytes and the assumptions of ``gpus.py``.

A prediction for comparing layouts. Hosts, data and grading, which overlaps sampling, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.commands.plan.activations import DELTA_CHUNK
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.fp8 import matrix_cost, quantizing_bytes
from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.memory import trained_parameters
from rlmath.commands.plan.models import (
    active_matrices,
    expert_matrices,
    feed_forward_matrices,
    shared_expert_matrices,
)
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

# All-reduces of a layer between tensor ranks: after attention and after the feed-forward.
ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True)
class Work:
    prompts: int
    group_size: int
    minibatches: int
    prompt_tokens: int  # Longest prompt, as the length of all.
    response_tokens: int  # Longest response.
    mean_response_tokens: int
    calls: float = 0.0  # Mean calls of tools in a response.
    call_s: float = 0.0  # Mean seconds of a call.
    parallel_calls: int = 1  # Calls at once.

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def longest_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def mean_tokens(self) -> int:
        return self.prompt_tokens + self.mean_response_tokens

    @property
    def tokens(self) -> int:
        return self.sequences * self.mean_tokens


def forward_flops(spec: ModelSpec, sequence_tokens: float, cost: float = 1.0) -> float:
    """Operations of a forward pass per token of a sequence of that length.

    Two for each weight of a matrix, the output layer among them, and causal attention: two products
    of width q with half of the sequence on average. Narayanan et al. 2021, appendix, for grouped
    queries, a gated feed-forward and a causal mask. ``cost``: relative cost of an operation of a
    layer's matrices, see ``fp8.py``.
    """
    attention = _attention_flops(spec, sequence_tokens)
    return cost * 2 * active_matrices(spec) + attention + _output_flops(spec)


def _recomputed_flops(
    spec: ModelSpec, actor: ActorShape, sequence_tokens: float, cost: float
) -> float:
    """Operations of the modules that the backward pass computes again, per token."""
    dense, moe = spec.layers - spec.moe_layers, spec.moe_layers
    shared = moe * shared_expert_matrices(spec)
    routed = moe * (spec.experts_per_token * expert_matrices(spec) + spec.experts * spec.hidden)
    matrices = {
        "core_attn": 0,
        "mlp": dense * feed_forward_matrices(spec),
        "moe": routed + shared,
        "shared_experts": shared,
    }
    found = cost * 2.0 * sum(matrices[name] for name in actor.recompute_modules)
    if "core_attn" in actor.recompute_modules:
        found += _attention_flops(spec, sequence_tokens)
    return found


def _attention_flops(spec: ModelSpec, sequence_tokens: float) -> float:
    """Operations of causal attention between the projections, per token.

    Of linear attention, per head: three products with the state; and within a chunk two of keys,
    one with what is written, and a triangular system (Yang et al. 2024, arXiv:2412.06464,
    section 3.3). They do not grow with the sequence.
    """
    seen, window = sequence_tokens / 2, spec.sliding_window
    if window is not None and window < sequence_tokens:
        # The first tokens attend to all tokens before them, the others to the window.
        windowed = window - window**2 / (2 * sequence_tokens)
        full = len(spec.full_layers) / spec.layers
        seen = full * seen + (1 - full) * windowed
    layers = spec.layers - len(spec.linear_layers)
    found = layers * 2 * (spec.heads * spec.head_dim + spec.value_width) * seen
    if spec.linear is not None:
        one = spec.linear
        key, value = one.key_head_dim, one.value_head_dim
        per_head = 6 * key * value + DELTA_CHUNK * (5 * key + 3 * value)
        found += len(spec.linear_layers) * one.value_heads * per_head
    return found


def _decoding_flops(spec: ModelSpec, sequence_tokens: float) -> float:
    """Operations per token that is sampled, where they differ from :func:`forward_flops`.

    Latent attention decodes in the latent vectors' width: every head's scores and output are
    products with the vector and the rotated part (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """
    whole = forward_flops(spec, sequence_tokens)
    if spec.latent is None:
        return whole
    one = spec.latent
    width = spec.heads * (2 * one.kv_rank + one.rotary_dim)
    usual = _attention_flops(spec, sequence_tokens)
    return whole - usual + spec.layers * 2 * width * sequence_tokens / 2


def _output_flops(spec: ModelSpec) -> int:
    return 2 * spec.vocab * spec.hidden


def slowest_stage_share(
    spec: ModelSpec, layout: Layout, sequence_tokens: float, cost: float = 1.0
) -> float:
    """Work of the slowest stage divided by the mean; the last stage has the output layer."""
    whole, output = forward_flops(spec, sequence_tokens, cost), _output_flops(spec)
    work = [size * (whole - output) / spec.layers for size in layout.stage_sizes(spec.layers)]
    work[-1] += output
    return max(work) / (whole / len(work))


def actor_time_s(
    spec: ModelSpec,
    actor: ActorShape,
    work: Work,
    gpu: Gpu,
    efficiency: Efficiency,
    gpus_per_node: int,
) -> tuple[float, float]:
    """Seconds of log-probs and of the update, on all ranks together."""
    layout = actor.layout
    tp, pp, cp, dp, ep = (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        layout.data_parallel,
        layout.expert_parallel,
    )
    ranks = layout.world_size
    peak = gpu.peak_tflops * 1e12 * efficiency.mfu
    cost = matrix_cost(actor.fp8, gpu)
    flops = forward_flops(spec, work.mean_tokens, cost)
    forward = work.tokens * flops / (ranks * peak)
    if actor.fp8 is not None:
        # Memory-bound, like decoding; the backward pass moves twice the bytes for gradients.
        bandwidth = gpu.memory_gb_per_s * 1e9 * efficiency.decode_bandwidth
        forward += work.tokens * quantizing_bytes(spec) / (ranks * bandwidth)

    def rate(neighbors: int) -> float:
        """Bytes a second between this many neighbors, which share a node if they can."""
        on_node = neighbors <= gpus_per_node
        gb_per_s = gpu.link_gb_per_s if on_node else efficiency.network_gb_per_s
        return gb_per_s * 1e9 * efficiency.link

    # A ring moves 2 (t - 1) / t times the bytes; with sequence parallelism the same, in two halves.
    ring = 2 * (tp - 1) / tp
    tokens, layers = work.tokens / layout.copies, spec.layers / pp
    reduced = tokens * layers * ALL_REDUCES_PER_LAYER * 2 * spec.hidden
    tensor = ring * reduced / rate(tp)
    # Keys and values of the other context ranks; on the way back their gradients as well.
    values = spec.value_width if spec.latent else spec.kv_heads * spec.head_dim
    both = 2 * (spec.kv_heads * spec.head_dim + values) / tp
    context = (cp - 1) * tokens * layers * both / rate(tp * cp)
    # Each token goes to its experts and back.
    sent = tokens / tp * spec.experts_per_token * 2 * 2 * spec.hidden
    moe_layers = spec.moe_layers / pp
    experts = (ep - 1) / ep * sent * moe_layers / rate(max(tp, ep))
    per_rank = work.sequences / work.minibatches / dp
    microbatches = max(1.0, per_rank * work.mean_tokens / actor.max_tokens)
    # Share of time in which stages wait: (p - 1) / m, Narayanan et al. 2021, section 2.2.1, and
    # section 2.2.2 for several chunks.
    bubble = 1 + (pp - 1) / microbatches / layout.virtual_stages
    arithmetic = forward * slowest_stage_share(spec, layout, work.mean_tokens, cost)
    passes = microbatches * work.minibatches
    forward = _with_launches(arithmetic, spec, layout, passes, efficiency)
    # Each pass of a stage sends and receives for each of its chunks.
    chunks = layout.virtual_stages if pp > 1 else 0
    message_s = 2 * chunks * efficiency.pipeline_message_s
    messages = passes * message_s
    again = actor.recompute_layers * pp / spec.layers
    modules = _recomputed_flops(spec, actor, work.mean_tokens, cost) / flops
    # In the backward pass a recomputed MoE sends its tokens again, and a dense feed-forward sums
    # its output.
    sent_again = experts * ("moe" in actor.recompute_modules)
    sent_again += tensor / ALL_REDUCES_PER_LAYER * bool({"mlp", "moe"} & {*actor.recompute_modules})
    parameters = trained_parameters(spec, actor, 0)
    # Float32 gradients are reduce-scattered, bfloat16 weights gathered.
    copies = layout.copies
    data = data_s = work.minibatches * 6 * parameters * (copies - 1) / copies / rate(ranks)
    reduced_s = 4 / 6 * data_s
    once = tensor + experts + messages
    per_stage = max(layout.stage_sizes(spec.layers))
    context_s = (cp - 1) * per_stage * efficiency.context_step_s
    log_probs = 0.0
    if work.minibatches > 1:
        # A pass joins micro-batches, but routes and FP8 scales need those of the update.
        of_update = bool(spec.experts or actor.fp8)
        joined = passes * (1.0 if of_update else actor.max_tokens / actor.in_forward.max_tokens)
        joined = max(1.0, joined)
        log_probs = _with_launches(arithmetic, spec, layout, joined, efficiency)
        log_probs += tensor + experts + context + joined * (message_s + context_s)
        log_probs *= 1 + (pp - 1) / joined / layout.virtual_stages
    context += passes * context_s
    # The backward pass costs two forward passes, one of them for the gradients of weights, which
    # frozen weights do not have; a recomputed layer costs one more (the same, section 3).
    compute = forward * ((2 if actor.lora else 3) + again + modules)
    if actor.overlap_gradients:
        # Sums end with the backward pass of each minibatch's last micro-batch, or after it.
        data -= min(reduced_s, (compute - forward) / microbatches)
    if actor.overlap_param_gather:
        # Overlaps the first forward pass of each minibatch after the first; the weight sync waits
        # for the last update.
        hidden = min(data_s - reduced_s, forward / microbatches)
        data -= (work.minibatches - 1) / work.minibatches * hidden
    # Recomputing a layer sends nothing between stages.
    moved = once * (2 + again) - messages * again + sent_again + context * (3 + again)
    update = (compute + moved) * bubble + data
    return log_probs, update


def _with_launches(
    forward: float, spec: ModelSpec, layout: Layout, passes: float, efficiency: Efficiency
) -> float:
    """Seconds of forward passes with the host's launches.

    The GPU may finish a small micro-batch before the host has launched the next kernels, so a dense
    layer takes the longer of the two. A layer of experts copies its token counts to the host, which
    launches the experts only then, so both add up.

    Args:
        forward: Seconds of the arithmetic, on the slowest stage.
        passes: Micro-batches.
    """
    launched = passes * max(layout.stage_sizes(spec.layers)) * efficiency.layer_launch_s
    moe = spec.moe_layers / spec.layers
    return max(forward * (1 - moe), launched * (1 - moe)) + (forward + launched) * moe


@dataclass(frozen=True)
class Decoding:
    """How an engine samples its share."""

    seconds: float
    running: int  # Sequences at once.
    step_s: float  # Seconds of a decoding step: one token of each running sequence.
    tail_s: float  # Share of seconds after the mean response.


def decoding(
    spec: ModelSpec,
    engines: int,
    tp: int,
    cache_tokens: float,
    most_running: int,
    work: Work,
    gpu: Gpu,
    efficiency: Efficiency,
    weights_bytes: float | None = None,
    token_bytes: float | None = None,
) -> Decoding:
    """The time of an engine's share of the samples, memory-bound or bound by arithmetic.

    A step reads the weights and the running sequences' keys and values once (Pope et al. 2022,
    "Efficiently Scaling Transformer Inference", section 2.1).

    Args:
        weights_bytes: Weights of a rank; ``None``: in bfloat16, like ``token_bytes``.
        token_bytes: Keys and values of one token on a rank.
    """
    weights = engine_weights_bytes(spec, tp) if weights_bytes is None else weights_bytes
    kept = token_bytes or kv_bytes(spec, tp, sequence_tokens=work.mean_tokens)
    share = -(-work.sequences // engines)
    running = max(1, min(share, most_running, int(cache_tokens // work.mean_tokens)))

    def step_s(count: float, context: float) -> float:
        read = weights + count * context * kept
        memory = read / (gpu.memory_gb_per_s * 1e9 * efficiency.decode_bandwidth)
        flops = count * _decoding_flops(spec, 2 * context)
        arithmetic = flops / (tp * gpu.peak_tflops * 1e12 * efficiency.mfu)
        latency = efficiency.all_reduce_s * ALL_REDUCES_PER_LAYER * spec.layers if tp > 1 else 0.0
        return max(memory, arithmetic) + latency + efficiency.decode_step_s

    middle = step_s(running, work.prompt_tokens + work.mean_response_tokens / 2)
    bulk = share * work.mean_response_tokens / running * middle
    last = max(1.0, running * efficiency.tail_share)
    tail_tokens = work.response_tokens - work.mean_response_tokens
    tail = tail_tokens * step_s(last, (work.longest_tokens + work.mean_tokens) / 2)
    return Decoding(bulk + tail, running, middle, tail)


def with_calls_s(sampling_s: float, work: Work) -> float:
    """Seconds of sampling with calls of tools.

    Engines sample other responses during calls, so calls add time only at the end, when just the
    longest responses are left, or throughout if there are more calls than run in parallel.
    """
    of_response = work.calls * work.call_s
    return max(sampling_s + of_response, work.sequences * of_response / work.parallel_calls)


def offload_time_s(moved_bytes: float, efficiency: Efficiency) -> float:
    """State to host memory and back, once in a step, without overlap. ``moved_bytes``: bytes of one
    rank, in one direction."""
    return 2 * moved_bytes / (efficiency.host_gb_per_s * 1e9)


def ranks_of_copy(layout: Layout) -> int:
    """Ranks that together hold the model once."""
    return max(layout.tensor_parallel, layout.expert_parallel) * layout.pipeline_parallel


def weight_sync_time_s(
    spec: ModelSpec,
    layout: Layout,
    gpu: Gpu,
    efficiency: Efficiency,
    gpus_per_node: int,
    expert_part: float = 1.0,
) -> float:
    """Seconds in which each rank gathers the rest of the model, over links within a node.
    ``expert_part``: share of all experts' bytes that the busiest rank moves, if each gets a share
    (``rlmath.weights.expert_shares``); 1: all get all."""
    ranks = ranks_of_copy(layout)
    rate = gpu.link_gb_per_s if ranks <= gpus_per_node else efficiency.network_gb_per_s
    lacks = 1 - 1 / ranks
    experts = spec.num_expert_parameters
    parameters = lacks * (spec.num_parameters - experts) + experts * min(lacks, expert_part)
    return 2 * parameters / (rate * 1e9 * efficiency.link)
