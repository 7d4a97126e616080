"""Values inside a model's layers, recorded by hooks and joined from the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmath.engines.layer_values import EMBEDDING, HEAD, NORM, Values
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.validation.probe import batch_of
from rlmath.weights.parameters import unwrap

if TYPE_CHECKING:
    from rlmath.actor.policy import MegatronActor


@dataclass(frozen=True)
class _Part:
    """One rank's part of a value ``[tokens, width]``."""

    value: Tensor
    # Dimension split between tensor ranks: columns, rows (tokens), or nothing.
    cut: Literal["columns", "rows", "nothing"] = "nothing"


_Parts = dict[tuple[int, str], _Part]
_Keep = Callable[[Tensor], _Parts]


class _Hooks:
    """Hooks that record inputs and outputs of modules."""

    def __init__(self) -> None:
        self.parts: _Parts = {}
        self._stack = ExitStack()

    def output(self, module: nn.Module | None, keep: _Keep) -> None:
        if module is None:
            return

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            # A copy: without gradients Megatron adds the residual in place.
            rows = value.detach().float().cpu().clone().reshape(-1, value.shape[-1])
            self.parts.update(keep(rows))

        self._stack.callback(module.register_forward_hook(hook).remove)

    def input(self, module: nn.Module, keep: _Keep) -> None:
        def hook(_: nn.Module, inputs: Any) -> None:
            rows = inputs[0].detach().float().cpu().clone().reshape(len(inputs[0]), -1)
            self.parts.update(keep(rows))

        self._stack.callback(module.register_forward_pre_hook(hook).remove)

    def close(self) -> None:
        self._stack.close()


def _as(key: tuple[int, str], cut: Literal["columns", "rows", "nothing"] = "nothing") -> _Keep:
    return lambda rows: {key: _Part(rows, cut)}


@torch.no_grad()
def hf_values(folder: str | Path, tokens: list[int]) -> Values:
    """Values that ``transformers`` computes from one sequence, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    hooks = _Hooks()
    spec = read_model_spec(folder)
    sizes = [spec.size("query"), spec.size("key_value"), spec.size("key_value")]
    for number, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            attention = layer.linear_attn
        matrix_out = getattr(attention, "o_proj", None) or attention.out_proj
        after = getattr(layer, "post_feedforward_layernorm", None)
        if after is None:
            hooks.output(layer.input_layernorm, _as((number, "input_norm")))
            hooks.output(layer.post_attention_layernorm, _as((number, "mlp_norm")))
        for name in ("q", "k", "v"):
            hooks.output(getattr(attention, f"{name}_proj", None), _as((number, name)))
        hooks.output(getattr(attention, "qkv_proj", None), _query_key_and_value(number, sizes))
        width = matrix_out.in_features
        hooks.input(
            matrix_out,
            lambda rows, at=number, width=width: {  # type: ignore[misc]
                (at, "attention"): _Part(rows.reshape(-1, width))
            },
        )
        # Norms after attention and feed-forward are part of Megatron's last matrix of each.
        attention_out = matrix_out if after is None else layer.post_attention_layernorm
        hooks.output(attention_out, _as((number, "attention_out")))
        hooks.output(getattr(layer.mlp, "gate_proj", None), _as((number, "gate")))
        hooks.output(getattr(layer.mlp, "up_proj", None), _as((number, "up")))
        hooks.output(getattr(layer.mlp, "gate_up_proj", None), _gate_and_up(number))
        hooks.output(layer.mlp if after is None else after, _as((number, "mlp")))
    last = len(model.model.layers)
    hooks.output(model.model.embed_tokens, _as((-1, EMBEDDING)))
    hooks.output(model.model.norm, _as((last, NORM)))
    hooks.output(model.lm_head, _as((last, HEAD)))
    model(torch.tensor([tokens]))
    hooks.close()
    return {key: part.value for key, part in hooks.parts.items()}


@torch.no_grad()
def megatron_values(
    actor: MegatronActor, tokens: list[int], noise_seed: int | None = None
) -> Values:
    """Values that Megatron computes from one sequence, joined from all ranks. Collective.
    ``actor``: at any tensor, pipeline, data and expert parallelism. ``noise_seed``: seed of a
    different rounding of every activation; ``None``: as usual."""
    chunks: list[Any] = list(map(unwrap, actor.chunks))
    spec = actor.spec
    # Sequence parallelism splits the tokens of outputs that the matrices leave whole.
    whole: Literal["rows", "nothing"] = (
        "rows" if actor.settings.model.sequence_parallel else "nothing"
    )
    hooks = _Hooks()
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        number = layer.layer_number - 1
        attention = layer.self_attention
        if hasattr(layer.input_layernorm, "weight"):
            hooks.output(layer.input_layernorm, _as((number, "input_norm"), whole))
        # Latent attention and linear attention have none.
        linear_qkv = getattr(attention, "linear_qkv", None)
        hooks.output(linear_qkv, _as((number, "qkv"), "columns"))
        matrix_out = getattr(attention, "linear_proj", None) or attention.out_proj
        hooks.input(matrix_out, _as((number, "attention"), "columns"))
        hooks.output(matrix_out, _as((number, "attention_out"), whole))
        if hasattr(layer.pre_mlp_layernorm, "weight"):
            hooks.output(layer.pre_mlp_layernorm, _as((number, "mlp_norm"), whole))
        if not spec.is_moe_layer(number):
            hooks.output(layer.mlp.linear_fc1, _gate_and_up(number))
        hooks.output(layer.mlp, _as((number, "mlp"), whole))
    for chunk in chunks:
        embedding = getattr(chunk, "embedding", None)
        hooks.output(getattr(embedding, "word_embeddings", None), _as((-1, EMBEDDING), whole))
        hooks.output(chunk.decoder.final_layernorm, _as((spec.layers, NORM), whole))
        hooks.output(getattr(chunk, "output_layer", None), _as((spec.layers, HEAD), "columns"))
    # Each data-parallel share runs the sequence once, and so does each of the micro-batches that
    # interleaved stages need at least: the hooks keep the last one.
    layout = actor.layout
    times = layout.pipeline_parallel if layout.virtual_stages > 1 else 1
    batch = batch_of([(tokens[:1], tokens[1:])] * layout.data_parallel * times)
    if noise_seed is None:
        actor.log_probs(batch)
    else:
        actor.log_probs(batch, "noise", noise_seed)
    hooks.close()
    return _together(actor, hooks.parts, len(tokens))


def _together(actor: MegatronActor, parts: _Parts, num_tokens: int) -> Values:
    """Join the first data-parallel share's values over stages and tensor ranks."""
    mine = (actor.parallel.tp_rank, parts if actor.dp_rank == 0 else {})
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found: dict[tuple[int, str], list[_Part]] = {}
    for _, rank_parts in sorted(gathered, key=lambda pair: pair[0]):
        for key, part in rank_parts.items():
            found.setdefault(key, []).append(part)
    values: Values = {}
    for (layer, step), pieces in found.items():
        tensors, cut = [part.value for part in pieces], pieces[0].cut
        if cut == "nothing":
            tensors = tensors[:1]
        # Tokens after the sequence's end are padding for the tensor ranks.
        value = torch.cat(tensors, 0 if cut == "rows" else -1)[:num_tokens]
        if step == "qkv":
            values |= _query_key_value(layer, value, actor.spec)
        else:
            values[layer, step] = value[:, : actor.spec.vocab] if step == HEAD else value
    return values


def _query_key_and_value(layer: int, sizes: list[int]) -> _Keep:
    def keep(rows: Tensor) -> _Parts:
        parts = zip("qkv", rows.split(sizes, -1), strict=True)
        return {(layer, name): _Part(part) for name, part in parts}

    return keep


def _gate_and_up(layer: int) -> _Keep:
    def keep(rows: Tensor) -> _Parts:
        gate, up = rows.chunk(2, -1)
        return {(layer, "gate"): _Part(gate, "columns"), (layer, "up"): _Part(up, "columns")}

    return keep


def _query_key_value(layer: int, rows: Tensor, spec: ModelSpec) -> Values:
    """Split Megatron's groups of query heads, key head and value head into three values. In the
    files the gate of a gated head follows the head, in Megatron the heads of a group."""
    queries = spec.heads // spec.kv_heads
    gates = 2 if spec.family.gated_attention else 1
    heads = rows.reshape(-1, spec.kv_heads, gates * queries + 2, spec.head_dim)
    query, key, value = heads.split([gates * queries, 1, 1], dim=2)
    query = query.unflatten(2, (gates, queries)).transpose(2, 3)
    parts = query, key, value
    return {
        (layer, name): part.flatten(1) for name, part in zip(("q", "k", "v"), parts, strict=True)
    }
