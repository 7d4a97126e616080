"""Where a Megatron model and its Hugging Face folder part: the first layer and the parameters.

Both run the same tokens. Within each layer the values are compared in the order in which they are
computed, so the first that differ come from right inputs, and the step between is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlmath.device import Platform
from rlmath.types import MicroBatch
from rlmath.weights.parameters import unwrap
from rlmath.weights.probe import batch_of
from rlmath.weights.shape import ModelShape

# Relative to the largest value: above what float32 leaves, below what a wrong weight does.
DEFAULT_TOLERANCE = 1e-4

# What is compared in a layer, in order of computation, and which parameters are at fault there.
_STEPS = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj (rows of query in linear_qkv)",
    "k": "self_attn.k_proj (rows of key in linear_qkv)",
    "v": "self_attn.v_proj (rows of value in linear_qkv)",
    "attention": "rotary embedding, q_norm, k_norm or the attention itself",
    "attention_out": "self_attn.o_proj (linear_proj)",
    "mlp_norm": "post_attention_layernorm (pre_mlp_layernorm)",
    "gate": "mlp.gate_proj (first half of linear_fc1)",
    "up": "mlp.up_proj (second half of linear_fc1)",
    "mlp": "mlp.down_proj (linear_fc2), or the experts and their router",
}

Values = dict[tuple[int, str], Tensor]
Keep = Callable[[Tensor], Values]


@torch.no_grad()
def first_difference(
    model: nn.Module,
    folder: str | Path,
    tokens: list[int],
    shape: ModelShape,
    platform: Platform,
    tolerance: float = DEFAULT_TOLERANCE,
) -> str | None:
    """Name the first place where Megatron and ``transformers`` differ.

    Args:
        model: Megatron's ``GPTModel``, whole: tensor and pipeline parallelism of 1.
        folder: Hugging Face folder to compare with.
        tokens: One sequence.
        shape: The model.
        platform: Of this process.
        tolerance: Largest difference, relative to the largest value of each compared tensor.

    Returns:
        Layer and parameters, with the difference; ``None`` when all is alike.
    """
    ours = _megatron_values(model, tokens, shape, platform)
    theirs = _hf_values(folder, tokens)
    for key in _in_order(shape):
        if key not in ours or key not in theirs:
            # Transformer Engine fuses norms into the matrices that follow them.
            continue
        one, two = ours[key], theirs[key]
        difference = float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))
        if not difference <= tolerance:
            layer, step = key
            where = f"layer {layer}, {_STEPS[step]}" if step in _STEPS else step
            return f"{where}: values differ by {difference:.1e} of the largest"
    return None


def _in_order(shape: ModelShape) -> Iterator[tuple[int, str]]:
    yield -1, "embed_tokens (word_embeddings)"
    for layer in range(shape.layers):
        for step in _STEPS:
            yield layer, step
    yield shape.layers, "norm (final_layernorm)"
    yield shape.layers, "lm_head (output_layer)"


class _Taps:
    """Hooks that note what modules take and give."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._stack = ExitStack()

    def output(self, module: nn.Module | None, keep: Keep) -> None:
        if module is None:
            return

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            # A copy: without gradients Megatron adds the residual in place.
            self.values.update(keep(value.detach().float().cpu().clone()))

        self._stack.callback(module.register_forward_hook(hook).remove)

    def input(self, module: nn.Module, key: tuple[int, str], width: int) -> None:
        def hook(_: nn.Module, inputs: Any) -> None:
            self.values[key] = inputs[0].detach().float().cpu().clone().reshape(-1, width)

        self._stack.callback(module.register_forward_pre_hook(hook).remove)

    def close(self) -> None:
        self._stack.close()


def _rows(key: tuple[int, str]) -> Keep:
    """Keep a value as ``[tokens, width]``: neither side has more than one sequence."""
    return lambda value: {key: value.reshape(-1, value.shape[-1])}


def _hf_values(folder: str | Path, tokens: list[int]) -> Values:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    taps = _Taps()
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        taps.output(layer.input_layernorm, _rows((number, "input_norm")))
        for name in ("q", "k", "v"):
            taps.output(getattr(attention, f"{name}_proj"), _rows((number, name)))
        taps.input(attention.o_proj, (number, "attention"), attention.o_proj.in_features)
        taps.output(attention.o_proj, _rows((number, "attention_out")))
        taps.output(layer.post_attention_layernorm, _rows((number, "mlp_norm")))
        taps.output(getattr(layer.mlp, "gate_proj", None), _rows((number, "gate")))
        taps.output(getattr(layer.mlp, "up_proj", None), _rows((number, "up")))
        taps.output(layer.mlp, _rows((number, "mlp")))
    last = len(model.model.layers)
    taps.output(model.model.embed_tokens, _rows((-1, "embed_tokens (word_embeddings)")))
    taps.output(model.model.norm, _rows((last, "norm (final_layernorm)")))
    taps.output(model.lm_head, _rows((last, "lm_head (output_layer)")))
    model(torch.tensor([tokens]))
    taps.close()
    return taps.values


def _megatron_values(
    model: nn.Module, tokens: list[int], shape: ModelShape, platform: Platform
) -> Values:
    from rlmath.actor.packing import pack
    from rlmath.actor.parallel import Layout

    chunk: Any = unwrap(model)
    taps = _Taps()
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        attention = layer.self_attention
        if hasattr(layer.input_layernorm, "weight"):
            taps.output(layer.input_layernorm, _rows((number, "input_norm")))
        taps.output(attention.linear_qkv, _split_qkv(number, shape))
        taps.input(attention.linear_proj, (number, "attention"), shape.size("query"))
        taps.output(attention.linear_proj, _rows((number, "attention_out")))
        if hasattr(layer.pre_mlp_layernorm, "weight"):
            taps.output(layer.pre_mlp_layernorm, _rows((number, "mlp_norm")))
        if not shape.is_moe_layer(number):
            taps.output(layer.mlp.linear_fc1, _split_gate_up(number))
        taps.output(layer.mlp, _rows((number, "mlp")))
    last = shape.layers
    taps.output(chunk.embedding.word_embeddings, _rows((-1, "embed_tokens (word_embeddings)")))
    taps.output(chunk.decoder.final_layernorm, _rows((last, "norm (final_layernorm)")))
    taps.output(chunk.output_layer, _vocabulary(last, shape.vocab))
    batch = batch_of([(tokens[:1], tokens[1:])])
    one = pack(batch, MicroBatch((0,), len(tokens)), platform, Layout(1, 1, 1))
    training = model.training
    model.eval()
    model(one.tokens, one.position_ids, None, packed_seq_params=one.packed_seq_params)
    model.train(training)
    taps.close()
    return taps.values


def _split_qkv(layer: int, shape: ModelShape) -> Keep:
    def keep(value: Tensor) -> Values:
        queries = shape.heads // shape.kv_heads
        heads = value.reshape(-1, shape.kv_heads, queries + 2, shape.head_dim)
        parts = heads.split([queries, 1, 1], dim=2)
        return {
            (layer, name): part.flatten(1)
            for name, part in zip(("q", "k", "v"), parts, strict=True)
        }

    return keep


def _split_gate_up(layer: int) -> Keep:
    def keep(value: Tensor) -> Values:
        gate, up = value.reshape(-1, value.shape[-1]).chunk(2, -1)
        return {(layer, "gate"): gate, (layer, "up"): up}

    return keep


def _vocabulary(last: int, vocab: int) -> Keep:
    def keep(value: Tensor) -> Values:
        rows = value.reshape(-1, value.shape[-1])[:, :vocab]
        return {(last, "lm_head (output_layer)"): rows}

    return keep
