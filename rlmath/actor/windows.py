"""Layers with sliding-window attention, and the other differences of such layers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rlmath.actor.layers import submodules_of_layers
from rlmath.actor.rotary import rope_inverse_frequencies, softmax_scale
from rlmath.model.spec import ModelSpec


def window_settings(spec: ModelSpec, max_sequence_length: int) -> dict[str, Any]:
    """Fields of Megatron's config; empty if no sequence is longer than the window."""
    if spec.sliding_window is None or max_sequence_length <= spec.sliding_window:
        return {}
    return {
        # Keys before a query's own, and after it.
        "window_size": (spec.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(spec.is_windowed(layer)) for layer in range(spec.layers)],
    }


def scale_by_layer(layers: Any, spec: ModelSpec) -> None:
    """Give each layer's attention the scale of its rotary embedding; Megatron has only one scale
    for all layers (see :func:`softmax_scale`). ``layers``: the layer specs of ``GPTModel``."""
    if spec.window_rope is None or softmax_scale(spec) == softmax_scale(spec, spec.window_rope):
        return
    attentions = {
        one.self_attention.submodules.core_attention for one in submodules_of_layers(layers)
    }
    (attention,) = attentions
    scales = [
        softmax_scale(spec, spec.window_rope if spec.is_windowed(layer) else None)
        for layer in range(spec.layers)
    ]
    scaled = _with_scales(attention, scales)
    for one in submodules_of_layers(layers):
        one.self_attention.submodules.core_attention = scaled


def _with_scales(attention: type[Any], scales: list[float | None]) -> type[Any]:
    class ScaledAttention(attention):  # type: ignore[misc]
        """Attention with the scale of its layer, counted from 1."""

        def __init__(self, *, layer_number: int, **arguments: Any) -> None:
            arguments["softmax_scale"] = scales[layer_number - 1]
            super().__init__(layer_number=layer_number, **arguments)

    return ScaledAttention


def rotate_windowed_layers(model: Any, spec: ModelSpec) -> None:
    """Give windowed layers the angles of their separate rotary embedding.

    Megatron computes one table for all layers; these layers' attention is called with another table
    of the same number of positions. ``model``: Megatron's ``GPTModel``.
    """
    if spec.window_rope is None or spec.window_rope == spec.rope:
        return
    frequencies, _ = rope_inverse_frequencies(spec, spec.window_rope)

    @functools.lru_cache(maxsize=1)
    def angles(positions: int, device: torch.device) -> torch.Tensor:
        """``[positions, 1, 1, rotary_dim]`` float32, equal in both halves of a head."""
        table = torch.outer(torch.arange(positions).float(), frequencies).to(device)
        return torch.cat([table, table], dim=-1)[:, None, None, :]

    def own_rotary(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs["rotary_pos_emb"]
        return args, kwargs | {"rotary_pos_emb": angles(given.size(0), given.device)}

    for layer in model.decoder.layers:
        if spec.is_windowed(layer.layer_number - 1):
            layer.self_attention.register_forward_pre_hook(own_rotary, with_kwargs=True)
