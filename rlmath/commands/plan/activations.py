"""Bytes of a micro-batch's activations and logits on one rank, counted from tensors.

After Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"),
section 4, whose layer has dropout masks, attention that stores its scores, and a feed-forward of
two matrices. Ours has no masks, keeps one float32 per head and token in the place of scores (flash
attention, Dao et al. 2022), and has a third matrix. The two kinds of layers differ:

``transformer_engine``: fused rotation keeps nothing, all experts of a rank run at once, and a
context-parallel rank keeps its own keys and values alone.
``local``: Megatron's own layers. The rotation keeps cosines and sines for each layer, experts run
one by one, and a context rank keeps all keys and values.

Dry runs count ``local`` (``benchmarks/dry_run``); for ``transformer_engine`` this page of
arithmetic stands alone until it is measured on a GPU. With ``actor.fp8`` what matrices keep of
their inputs is in FP8 (``fp8.py``).
"""

from __future__ import annotations

import functools

from rlmath.actor.head_rows import rows_per_chunk, rows_per_table, weight_rows_per_block
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.fp8 import ACTIVATION_BYTES, gradient_copy_bytes, saved_input_bytes
from rlmath.model.families import QkNorm
from rlmath.model.lora import DELTA_TARGETS
from rlmath.model.parallel import Layout
from rlmath.model.spec import LinearAttention, ModelSpec, padded_vocab_size

# Tokens of a chunk of a gated delta net (rlmath/device/delta_rule.py, which imports torch).
DELTA_CHUNK = 64
# Rows whose softmax is in float32 at once: rlmath.actor.logprobs.ROWS_PER_CHUNK, which imports
# torch; a test holds the two together.
SOFTMAX_ROWS = 2048
# Float32 tables of such rows, forward and backward.
FORWARD_TABLES, BACKWARD_TABLES = 2, 3
# Bytes of a row that rlmath.actor.softmax_triton has at once over several tensor ranks: float32
# numbers.
KERNEL_ROW_BYTES = 4 * 16


def layer_bytes(spec: ModelSpec, actor: ActorShape, stage: int | None = None) -> float:
    """Activations that a layer keeps for its backward pass, per token of the micro-batch.

    Two bytes for each of: the inputs of both norms and their outputs (4 h); queries, keys and
    values in one matrix, whole, because values are a view of it (q + 2 k); rotated queries and
    keys (q + k); attention's output (q); gate and up (2 f), their product (f). Four for the log of
    attention's denominator per head. All are split over tensor ranks, the first four along the
    sequence (Korthikanti et al. 2022, eq. 4). A norm of queries and keys keeps its inputs as well.
    What ``local`` layers keep beyond that is in the module's docstring.

    Of latent attention (Megatron's ``MLASelfAttention``): both latent vectors as they are gathered,
    whole on each rank, and after their norms; queries and keys, each put together of two parts;
    values; the output. Returns the mean over the stage's layers, or the model's, without what
    ``actor.recompute_modules`` drops.
    """
    parts, moe = _module_bytes(spec, actor, stage), _moe_share(spec, actor.layout, stage)
    dropped = sum(_share(moe, name) * parts[name] for name in actor.recompute_modules)
    return whole_layer_bytes(spec, actor, stage) - dropped


def whole_layer_bytes(spec: ModelSpec, actor: ActorShape, stage: int | None = None) -> float:
    """:func:`layer_bytes` of a layer without recomputation."""
    moe = _moe_share(spec, actor.layout, stage)
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention: float = 3 * query + 3 * key
    if spec.qk_norm is not QkNorm.none:
        attention += query + key
    if spec.family.gated_attention:
        # Gates, and their products with attention's output.
        attention += 2 * query
    if spec.linear is not None:
        linear = _linear_share(spec, actor.layout, stage)
        # The first matrix's output, and the last one's input.
        matrices = spec.linear.conv_channels + 2 * spec.linear.value_width
        attention = (1 - linear) * attention + linear * matrices
    gathered, rotated = 0, spec.head_dim
    if spec.latent is not None:
        one = spec.latent
        attention = 2 * query + 2 * spec.value_width
        attention += one.query_rank if _keeps_input(actor, "q_b_proj") else 0
        attention += one.kv_rank if _keeps_input(actor, "kv_b_proj") else 0
        gathered, rotated = one.query_rank + one.kv_rank + one.rotary_dim, one.rotary_dim
    widths: float = 4 * spec.hidden + attention
    first = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", *DELTA_TARGETS[:-1])
    if not _keeps_input(actor, *first):
        widths -= spec.hidden
    if not _keeps_input(actor, "gate_proj", "up_proj"):
        widths -= spec.hidden * _share(moe, "mlp")
    # In FP8 the first matrix keeps a copy of the norm's output; what attention gives it keeps
    # itself, and Megatron has the matrix after it keep the same (save_original_input).
    own = (saved_input_bytes(actor) - 2) * spec.hidden
    # Cosines and sines of queries and of keys, in the model's type, on every tensor rank.
    rotation = 10 * rotated if actor.layers == "local" else 0
    parts = _module_bytes(spec, actor, stage)
    modules = sum(_share(moe, name) * parts[name] for name in ("core_attn", "mlp", "moe"))
    if _norm_is_within(actor):
        # Counted with the feed-forward.
        widths -= spec.hidden * _share(moe, "mlp")
    return (2 * widths + own) / actor.layout.tensor_parallel + 2 * gathered + rotation + modules


def _delta_width(linear: LinearAttention) -> int:
    """Elements of a token that a gated delta net keeps between its matrices: outputs of the
    convolution and of the rule, and a row of the triangular system per head
    (``chunk_gated_delta_rule`` of flash-linear-attention, which computes the states again)."""
    return linear.conv_channels + linear.value_width + DELTA_CHUNK * linear.value_heads


def _keeps_input(actor: ActorShape, *targets: str) -> bool:
    """Whether one of the matrices that take the same keeps it: a frozen one without an adapter
    needs no gradient, and so keeps nothing."""
    return actor.lora is None or bool({*targets} & {*actor.lora.targets})


def _norm_is_within(actor: ActorShape) -> bool:
    """Transformer Engine's dense feed-forward has its norm in the first matrix; with adapters the
    two are apart."""
    return actor.layers != "local" and actor.lora is None


@functools.cache
def _moe_share(spec: ModelSpec, layout: Layout, stage: int | None) -> float:
    """Share of MoE layers in a stage, or in the model."""
    layers = range(spec.layers) if stage is None else layout.stage_layers(spec.layers, stage)
    return sum(map(spec.is_moe_layer, layers)) / len(layers) if layers else 0.0


@functools.cache
def _linear_share(spec: ModelSpec, layout: Layout, stage: int | None) -> float:
    """Share of layers with linear attention in a stage, or in the model."""
    layers = range(spec.layers) if stage is None else layout.stage_layers(spec.layers, stage)
    return sum(map(spec.is_linear_layer, layers)) / len(layers) if layers else 0.0


def _share(moe: float, module: str) -> float:
    """Share of the layers that have a module."""
    return {"core_attn": 1.0, "mlp": 1 - moe, "moe": moe, "shared_experts": moe}[module]


def _module_bytes(spec: ModelSpec, actor: ActorShape, stage: int | None = None) -> dict[str, float]:
    """Bytes that a layer keeps of each recomputable module, per token, beside the module's
    input."""
    layout = actor.layout
    tp, cp = layout.tensor_parallel, layout.context_parallel
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # Attention's output is the next matrix's input, and so is kept by it.
    attention: float = 4 * spec.heads
    if actor.layers == "local" and cp > 1:
        # Queries and outputs by length, and the keys and values of all ranks.
        attention += 2 * (2 * query + 2 * cp * key)
    if spec.linear is not None:
        linear = _linear_share(spec, layout, stage)
        attention = (1 - linear) * attention + linear * 2 * _delta_width(spec.linear)
    # Gate and up, and their product, which the next matrix takes.
    saved = saved_input_bytes(actor)
    products = 4 + (saved if _keeps_input(actor, "down_proj") else 0)
    dense = products * spec.ffn + (saved * spec.hidden if _norm_is_within(actor) else 0)
    # Each token's copies for its experts.
    copies = saved * spec.hidden if _keeps_input(actor, "gate_proj", "up_proj") else 0
    routed = spec.experts_per_token * (copies + products * spec.moe_ffn)
    shared = products * spec.shared_ffn
    return {
        "core_attn": attention / tp,
        "mlp": dense / tp,
        "moe": (routed + 8 * spec.experts + shared) / tp,
        "shared_experts": shared / tp,
    }


def feed_forward_width(spec: ModelSpec, moe: float | None = None) -> int:
    """Widest vector of a token in one layer's feed-forward. ``moe``: MoE layers among the layers
    that count; ``None``: all of the model's."""
    if moe is None:
        moe = spec.moe_layers / spec.layers
    dense = spec.ffn if moe < 1 else 0
    return max(dense, spec.experts_per_token * spec.moe_ffn if moe else 0)


def kept_bytes(spec: ModelSpec, actor: ActorShape, in_flight: float, stage: int) -> float:
    """Activations of the micro-batches that a stage has in flight.

    A recomputed layer keeps its input, 2 h bytes a token (Korthikanti et al. 2022, section 5).
    """
    inputs = _recomputed_layers(spec, actor, stage) * 2 * spec.hidden / actor.layout.tensor_parallel
    return in_flight * (_whole_layers_bytes(spec, actor, stage) + actor.tokens * inputs)


def _recomputed_layers(spec: ModelSpec, actor: ActorShape, stage: int) -> int:
    return min(actor.recompute_layers, actor.layout.stage_sizes(spec.layers)[stage])


def _whole_layers_bytes(spec: ModelSpec, actor: ActorShape, stage: int) -> float:
    whole = actor.layout.stage_sizes(spec.layers)[stage] - _recomputed_layers(spec, actor, stage)
    return whole * actor.tokens * layer_bytes(spec, actor, stage)


def attention_masks_bytes(spec: ModelSpec, actor: ActorShape, longest_tokens: int) -> float:
    """Masks of ``local`` layers under context parallelism: which key a query sees, a byte each."""
    if actor.layout.context_parallel == 1 or actor.layers != "local":
        return 0.0
    return actor.tokens * min(longest_tokens, actor.max_tokens)


def logits_bytes(
    spec: ModelSpec,
    actor: ActorShape,
    *,
    backward: bool,
    in_float32: bool = False,
    whole: bool = False,
    kernels: bool = False,
) -> float:
    """Logits of a micro-batch on the last stage, and the temporaries of the log-probs.

    ``rlmath/actor/head.py``: of the rank's slice of the vocabulary a chunk of rows, over which the
    backward pass writes their gradient; float32 tables of some of those rows, or a block of the
    weight's gradient; the hidden states that tensor ranks share, and the gradient of all.

    Args:
        in_float32: ``precision.lm_head_dtype=float32``: logits are float32, and so are blocks of
            the weight.
        whole: ``actor.logits=whole``.
        kernels: ``actor.logits=triton``: there are no tables.
    """
    if whole:
        return _whole_logits_bytes(spec, actor, backward=backward, in_float32=in_float32)
    tp = actor.layout.tensor_parallel
    width = padded_vocab_size(spec.vocab, tp) // tp
    size = 4 if in_float32 else 2
    rows = min(rows_per_chunk(width, size), actor.tokens)
    table = 0 if kernels else 4 * width * min(rows_per_table(width), rows)
    # Numbers of each row, with those of the kernels that the others have within their tables.
    of_rows = KERNEL_ROW_BYTES * rows if kernels else 0
    block = min(weight_rows_per_block(spec.hidden), width)
    hidden = 2 * spec.hidden
    gathered = hidden * actor.tokens if tp > 1 else 0
    # A block of the weight in float32 and its part of the logits.
    operands = 4 * block * (spec.hidden + rows) if in_float32 else 0
    logits = width * size * rows + gathered
    if not backward:
        return logits + hidden * rows + max(FORWARD_TABLES * table, operands, of_rows)
    # Hidden states are in float32 where they are parts of a sum.
    gradient = hidden * actor.tokens * (2 if in_float32 and tp > 1 else 1)
    taken = 2 * size * spec.hidden * rows
    working = taken + logits - gathered
    working += max(BACKWARD_TABLES * table, operands, size * block * spec.hidden, of_rows)
    if actor.overlap_gradients and actor.lora is None:
        # Zeros of the weight's size, from which Megatron's sum starts.
        working = max(working, 2 * width * spec.hidden)
    return gathered + gradient + working


def _whole_logits_bytes(
    spec: ModelSpec, actor: ActorShape, *, backward: bool, in_float32: bool
) -> float:
    """``rlmath/actor/logprobs.py``: the rank's slice of the vocabulary in bfloat16, in the backward
    pass its gradient too, and float32 tables of a chunk of rows; in float32 copies of the output
    layer's weight and input as well."""
    tp = actor.layout.tensor_parallel
    width = padded_vocab_size(spec.vocab, tp) // tp
    rows = min(SOFTMAX_ROWS, actor.tokens)
    copies, tables = (2, BACKWARD_TABLES) if backward else (1, FORWARD_TABLES)
    size = 4 if in_float32 else 2
    operands = 4 * spec.hidden * (width + actor.tokens / tp) if in_float32 else 0.0
    logits, chunk = width * size * copies * actor.tokens, 4 * width * tables * rows
    # The backward pass needs the operands again; a forward pass alone lets them go.
    return logits + (operands + chunk if backward else max(operands, chunk))


def _products(local: bool) -> int:
    """Bytes of gate and up, and of SwiGLU's temporaries; in dry runs it is not compiled."""
    return 8 if local else 6


def backward_bytes(
    spec: ModelSpec, actor: ActorShape, in_flight: float, stage: int
) -> dict[str, float]:
    """Activations and temporaries of the backward pass, at its peak.

    Either everything is kept and the last layer begins, or the layers that are not recomputed are
    through and the first recomputed layer is there once more, with its gradients.
    """
    moe, tp = _moe_share(spec, actor.layout, stage), actor.layout.tensor_parallel
    width = feed_forward_width(spec, moe)
    local = actor.layers == "local"
    kept = kept_bytes(spec, actor, in_flight, stage)
    # Transformer Engine adds a matrix's gradient to the float32 buffer as it computes it.
    # A frozen one has no gradient.
    trains = actor.lora is None
    matrix = 2 * spec.hidden * width / tp if local and trains else 0.0
    hidden = 2 * spec.hidden
    # The recomputed tensors of the last layer exist twice.
    parts = _module_bytes(spec, actor, stage)
    small = () if spec.linear is not None else ("core_attn",)
    modules = [one for one in actor.recompute_modules if one not in small and _share(moe, one)]
    again = max((parts[name] for name in modules), default=0)
    quantized = gradient_copy_bytes(actor, width)
    begin = {
        "activations": kept,
        "backward of a layer": actor.tokens
        * (_products(local) * width / tp + hidden + again + quantized)
        + matrix,
    }
    if not actor.recompute_layers:
        return begin
    again = whole_layer_bytes(spec, actor, stage) + (6 * width + 2 * hidden) / tp + hidden
    again += quantized
    # Copies of the tokens on their way to the experts and back, and their gradients.
    again += 2 * hidden * spec.experts_per_token / tp if moe else 0.0
    recomputed = {
        "activations": kept - _whole_layers_bytes(spec, actor, stage),
        "backward of a layer": actor.tokens * again + 2 * matrix,
    }
    return max(begin, recomputed, key=lambda one: sum(one.values()))


def forward_bytes(spec: ModelSpec, actor: ActorShape, stage: int | None = None) -> float:
    """The widest place of a forward pass that keeps nothing: the feed-forward, or latent attention.

    Of an MoE: copies of the tokens on their way to the experts and back. ``local`` experts run one
    after the other; Transformer Engine's run at once, and so all have their gate, up and product.
    """
    local, tp = actor.layers == "local", actor.layout.tensor_parallel
    attention = dense = moe = 0.0
    if spec.latent is not None:
        attention = _latent_forward_bytes(spec, tp)
    share = _moe_share(spec, actor.layout, stage)
    if share < 1:
        dense = (12 * spec.hidden + _products(local) * spec.ffn) / tp
    if share:
        copies = 5 * spec.hidden if local else 4 * spec.hidden + 3 * spec.moe_ffn
        moe = (10 * spec.hidden + 2 * spec.experts_per_token * copies) / tp
    if actor.fp8 is not None:
        # FP8 copy of the second matrix's input, for all experts together.
        copy = ACTIVATION_BYTES[actor.fp8.recipe]
        dense += copy * spec.ffn / tp if dense else 0.0
        moe += copy * spec.experts_per_token * (spec.hidden + spec.moe_ffn) / tp if moe else 0.0
    return actor.tokens * max(attention, dense, moe)


def _latent_forward_bytes(spec: ModelSpec, tp: int) -> float:
    """Latent attention per token, when keys are put together: queries as they come, their
    rotated part and the whole of both; what keys and values come from, the keys and the values;
    four of the hidden width around it, and the gathered vector of keys and values."""
    assert spec.latent is not None
    query, rotary = spec.heads * spec.head_dim, spec.latent.rotary_dim
    widths = 4 * spec.hidden + 2 * query + spec.heads * rotary
    widths += spec.size("content_and_value") + query + spec.value_width
    return 2 * (widths / tp + spec.latent.kv_rank + rotary)
