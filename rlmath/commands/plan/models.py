"""The model of a plan: a published one by name, a folder's config.json, or sizes one by one."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path
from typing import Any

from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.errors import UserError
from rlmath.model.families import Rule, When
from rlmath.model.hub import is_hub_model
from rlmath.model.lora import Lora, adapted_entries
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN, VERSIONS, published_config, published_name
from rlmath.model.spec import ModelSpec, model_spec, padded_vocab_size, read_model_spec
from rlmath.utils.close_names import did_you_mean

# Flags that give the sizes without a file, and the field of config.json that each stands for.
SHAPE_FLAGS = {
    "--layers": "num_hidden_layers",
    "--hidden": "hidden_size",
    "--ffn": "intermediate_size",
    "--heads": "num_attention_heads",
    "--kv-heads": "num_key_value_heads",
    "--vocab": "vocab_size",
}


def read_plan_model(arguments: argparse.Namespace, model: str | None) -> tuple[str, ModelSpec]:
    """Name or path, and spec, of the model that the command line asks for. Raises UserError: there
    is no such model, a size is missing, or the actor has no such architecture."""
    given = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in SHAPE_FLAGS}
    if model is None:
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            raise UserError(
                "rlmath plan layout: give model.path (a name, a folder or its config.json), or all "
                f"of its sizes; missing: {', '.join(missing)}"
            )
        config: dict[str, Any] = {SHAPE_FLAGS[flag]: value for flag, value in given.items()}
        config |= {
            "architectures": [arguments.architecture],
            "tie_word_embeddings": arguments.tied,
            "head_dim": arguments.head_dim,
            "max_position_embeddings": 2**20,
        }
        return "PATH", model_spec(config, "the model of these sizes")
    flags = [flag for flag, value in given.items() if value is not None]
    if flags:
        raise UserError(f"{', '.join(flags)}: the sizes are those of {model}; give one")
    return read_named_model(model)


def read_named_model(name: str) -> tuple[str, ModelSpec]:
    """Name or path, and spec, of a published model, a preset, a folder or its config.json. Raises
    UserError: there is no such model, or the actor has no such architecture."""
    path = Path(name)
    if path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return str(path), read_model_spec(path)
    if name in options("model"):  # A file of conf/model says whose folder it is for.
        name = load([f"model={name}", "runner.run_dir=runs/plan"]).model.path
    known = published_name(name)
    if known is None:
        names = (*KNOWN, *VERSIONS)
        hint = did_you_mean(name.rsplit("/", 1)[-1], names, cutoff=0.5)
        raise UserError(
            f"{name}: no folder with a config.json, and no model that is known by name{hint}; "
            f"known are {', '.join(KNOWN)}, most of them also as -Instruct or -Base, and "
            f"model={', model='.join(options('model'))}"
        )
    spec = model_spec(published_config(known), name)
    return name if is_hub_model(name) else f"models/{known}", spec


def attention_matrices(spec: ModelSpec) -> int:
    """Weights of a layer's attention that tensor ranks share: matrices and their biases."""
    if spec.latent is not None:
        whole = down_matrices(spec)
        query, latent = spec.heads * spec.head_dim, spec.latent
        up = query * latent.query_rank + decoding_matrices(spec)
        return whole + up + spec.value_width * spec.hidden
    query, both = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    given = query * (2 if spec.family.gated_attention else 1) + both
    bias = given if spec.qkv_bias else 0
    return spec.hidden * given + query * spec.hidden + bias


@functools.cache
def linear_matrices(spec: ModelSpec) -> int:
    """Weights of a layer of linear attention that tensor ranks share."""
    return sum(
        math.prod(map(spec.size, tensor.dims))
        for entry in spec.family.entries
        if entry.when is When.linear_layer and entry.rule is not Rule.replicated
        for tensor in entry.hf
    )


def down_matrices(spec: ModelSpec) -> int:
    """Latent attention: weights of a layer that give the latent vectors, which an engine's ranks
    have whole (``fused_qkv_a_proj`` in vLLM)."""
    if spec.latent is None:
        return 0
    one = spec.latent
    return spec.hidden * (one.query_rank + one.kv_rank + one.rotary_dim)


def decoding_matrices(spec: ModelSpec) -> int:
    """Latent attention: weights of a layer that make keys and values of a latent vector, which
    an engine's ranks have a second time for decoding (``W_UK_T`` and ``W_UV`` in vLLM)."""
    if spec.latent is None:
        return 0
    return spec.size("content_and_value") * spec.latent.kv_rank


def feed_forward_matrices(spec: ModelSpec) -> int:
    return 3 * spec.hidden * spec.ffn


def shared_expert_matrices(spec: ModelSpec) -> int:
    return 3 * spec.hidden * spec.shared_ffn


def expert_matrices(spec: ModelSpec) -> int:
    return 3 * spec.hidden * spec.moe_ffn


@functools.cache
def layer_norms(spec: ModelSpec, linear: bool = False) -> int:
    """Weights of one layer, with attention or with linear attention, that every tensor rank
    holds."""
    layer = next(n for n in range(spec.layers) if spec.is_linear_layer(n) is linear)
    one = (
        math.prod(map(spec.size, tensor.dims))
        for entry in spec.family.entries
        if entry.per_layer and entry.when is not When.moe_layer and spec.has(entry, layer)
        if entry.when is not When.linear_layer or entry.rule is Rule.replicated
        for tensor in entry.hf
        if len(tensor.dims) == 1 and entry.rule is not Rule.qkv
    )
    return sum(one)


def active_matrices(spec: ModelSpec) -> int:
    """Matrices of all layers that one token meets: of experts those that it is sent to."""
    dense, moe = spec.layers - spec.moe_layers, spec.moe_layers
    experts = spec.experts_per_token * expert_matrices(spec) + router_parameters(spec)
    feed_forward = dense * feed_forward_matrices(spec)
    feed_forward += moe * (shared_expert_matrices(spec) + experts)
    linear = len(spec.linear_layers)
    mixing = (spec.layers - linear) * attention_matrices(spec)
    return mixing + (linear * linear_matrices(spec) if linear else 0) + feed_forward


def router_parameters(spec: ModelSpec) -> int:
    """Weights of an MoE layer's router and of the gate of its shared experts."""
    return (spec.experts + int(spec.family.shared_expert_gate)) * spec.hidden


def is_last_stage(layout: Layout, stage: int) -> bool:
    return stage == layout.pipeline_parallel - 1


@functools.cache
def parameters_of_rank(spec: ModelSpec, layout: Layout, stage: int) -> int:
    """Weights that one rank of a pipeline stage holds in Megatron, without its experts.

    The first stage has the embedding, the last one the output layer; of a tied embedding a copy,
    unless it is the first as well.
    """
    tp = layout.tensor_parallel
    first, last = stage == 0, is_last_stage(layout, stage)
    table = padded_vocab_size(spec.vocab, tp) // tp * spec.hidden
    layers = layout.stage_layers(spec.layers, stage)
    moe = sum(map(spec.is_moe_layer, layers))
    linear = sum(map(spec.is_linear_layer, layers))
    matrices = (len(layers) - linear) * attention_matrices(spec)
    matrices += (len(layers) - moe) * feed_forward_matrices(spec)
    matrices += moe * shared_expert_matrices(spec)
    alike = moe * router_parameters(spec)
    if linear:
        matrices += linear * linear_matrices(spec)
        alike += linear * layer_norms(spec, linear=True)
    if linear < len(layers):
        alike += (len(layers) - linear) * layer_norms(spec)
    tables = 1 if first and last and spec.tied else int(first) + int(last)
    return matrices // tp + alike + tables * table + (spec.hidden if last else 0)


@functools.cache
def adapter_sizes_of_rank(
    spec: ModelSpec, layout: Layout, stage: int, lora: Lora, of_experts: bool = False
) -> tuple[int, ...]:
    """Elements of each parameter of adapters that one rank of a pipeline stage holds, either those
    of experts or the others.

    Of a matrix that tensor ranks share by rows ``b`` is shared and ``a`` is not; by columns the
    other way round (``rlmath/weights/adapters.py``).
    """
    layers = layout.stage_layers(spec.layers, stage)
    tp = layout.expert_tensor_parallel if of_experts else layout.tensor_parallel
    each = spec.experts // layout.expert_parallel if of_experts else 1
    sizes: list[int] = []
    for entry, layer in adapted_entries(spec, lora):
        if layer not in layers or entry.per_expert is not of_experts:
            continue
        rows = sum(spec.size(tensor.dims[0]) for tensor in entry.hf)
        columns = spec.size(entry.hf[0].dims[1])
        names = (tensor.name.format(layer=layer, expert=0) for tensor in entry.hf)
        parts = sum(map(lora.adapts, names))
        if entry.rule is Rule.row:
            sizes += [lora.rank * columns // tp, lora.rank * rows] * each
        else:
            sizes += [lora.rank * parts * columns, lora.rank * rows // tp] * each
    return tuple(sizes)


@functools.cache
def expert_parameters_of_rank(spec: ModelSpec, layout: Layout, stage: int) -> int:
    """Weights of experts that one rank of a pipeline stage holds."""
    moe = sum(map(spec.is_moe_layer, layout.stage_layers(spec.layers, stage)))
    sharing = layout.expert_parallel * layout.expert_tensor_parallel
    return -(-moe * spec.experts * expert_matrices(spec) // sharing)


def telling_stages(spec: ModelSpec, layout: Layout) -> list[int]:
    """Stages of which one is the fullest in any phase: the first and the last, and of those in
    between the first and the first of the longest."""
    sizes = layout.stage_sizes(spec.layers)
    last = len(sizes) - 1
    return sorted({0, min(1, last), sizes.index(max(sizes)), last})


def largest_parameter_of_rank(spec: ModelSpec, layout: Layout) -> int:
    """Elements of the largest Megatron parameter of a rank, experts apart."""
    tp = layout.tensor_parallel
    table = padded_vocab_size(spec.vocab, tp) // tp * spec.hidden
    dense = spec.moe_layers < spec.layers
    return max(table, 2 * spec.ffn // tp * spec.hidden if dense else 0)
