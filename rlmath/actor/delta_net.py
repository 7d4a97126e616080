"""Linear attention (gated delta net) of packed sequences in Megatron's layers.

Megatron 0.16.1 has the layer's parameters and checkpoints, but refuses packed sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlmath.actor.attention import Rectangles, rectangles
from rlmath.device.delta_rule import causal_convolution, gated_delta_rule, takes_packs


class GatedNorm(torch.nn.Module):
    """RMSNorm of each value head, times the SiLU of a gate.

    Tensor ranks have different heads and the same weight, so its gradient is summed over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``[..., value_head_dim]`` in float32; ``gate`` has the same shape."""
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight)
        normed = F.rms_norm(x.float(), self.weight.shape, weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class PackedConvolution(torch.nn.Conv1d):
    """A convolution of packed sequences.

    A module's call waits for its weight under ``actor.overlap_param_gather``; reading the weight
    of one that is not called does not.
    """

    def forward(self, input: Tensor, ends: Tensor | None = None) -> Tensor:
        """Arguments and result of :func:`causal_convolution`."""
        return causal_convolution(input, self.weight, ends)


class PackedDeltaNet(gated_delta_net.GatedDeltaNet):
    """Megatron's layer with another forward, for packed sequences.

    Convolution and state begin with each sequence.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # It refuses to be built without flash-linear-attention, which its own forward needs.
        gated_delta_net.HAVE_FLA = True
        super().__init__(*args, **kwargs)
        self.conv1d.__class__ = PackedConvolution
        config = self.config
        if config.context_parallel_size > 1:
            raise ValueError("linear attention needs whole sequences; use no context parallelism")
        self.recompute = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def reset_parameters(self) -> None:
        """Nothing: weights are always loaded."""

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map ``[tokens, 1, hidden]`` of packed sequences to the same shape."""
        mixed, _ = self.in_proj(hidden_states)
        parts = [self.conv_dim, self.v_dim, self.num_value_heads, self.num_value_heads]
        qkv, gate, beta, alpha = mixed[:, 0].split([n // self.tp_size for n in parts], -1)

        def core(qkv: Tensor, gate: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
            decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
            out = self._over_pack(qkv, decay, beta.sigmoid(), packed_seq_params)
            return self.out_norm(out, gate.unflatten(-1, out.shape[1:])).flatten(1)

        inputs = (qkv, gate, beta, alpha)
        out = tensor_parallel.checkpoint(core, False, *inputs) if self.recompute else core(*inputs)
        output: tuple[Tensor, Tensor | None] = self.out_proj(out[:, None])
        return output

    def _over_pack(self, qkv: Tensor, decay: Tensor, beta: Tensor, packed: Any) -> Tensor:
        """``[tokens, heads of this rank, value_head_dim]``."""
        if takes_packs(qkv):
            return self._attend(qkv[None], decay[None], beta[None], packed.cu_seqlens_q)[0]
        found, pieces = _rectangles(packed), []
        for one in found.classes:
            inputs = (
                x.index_select(0, one.rows.flatten()).unflatten(0, one.rows.shape)
                for x in (qkv, decay, beta)
            )
            pieces.append(self._attend(*inputs).flatten(0, 1))
        return torch.cat(pieces).index_select(0, found.places)

    def _attend(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, ends: Tensor | None = None
    ) -> Tensor:
        qkv = self.conv1d(qkv, ends)
        widths = [n // self.tp_size for n in (self.qk_dim, self.qk_dim, self.v_dim)]
        query, key, value = qkv.split(widths, -1)
        query, key = (x.unflatten(-1, (-1, self.key_head_dim)) for x in (query, key))
        value = value.unflatten(-1, (-1, self.value_head_dim))
        return gated_delta_rule(query, key, value, decay, beta, ends)


def _rectangles(packed: Any) -> Rectangles:
    """The rectangles of a pack, made once where :func:`pack` makes none."""
    from rlmath.actor.packing import SequenceRows

    found: Rectangles | None = getattr(packed, "rectangles", None)
    if found is None:
        ends = packed.cu_seqlens_q
        found = rectangles([SequenceRows(n) for n in ends.diff().tolist()], ends.device)
        packed.rectangles = found
    return found


def mix_linear_layers(
    layers: list[Any], config: Any, offset: int, norm: Any, first: Any, last: Any
) -> list[Any]:
    """Layer specs of a chunk with linear attention in place of attention where the model has it.

    Args:
        config: Megatron's ``TransformerConfig``.
        offset: Number of layers before the chunk.
        first: Class of matrices that tensor ranks share by rows; last: by columns.
    """
    modules = gated_delta_net.GatedDeltaNetSubmodules(first, GatedNorm, last)
    delta = ModuleSpec(PackedDeltaNet, submodules=modules)
    mixed = list(layers)
    for place, layer in enumerate(layers):
        if config.linear_attention_freq[offset + place]:
            names = dict(layer.submodules.sharded_state_dict_keys_map)
            names.pop("input_layernorm.", None)
            own = dataclasses.replace(
                layer.submodules,
                input_layernorm=norm,
                self_attention=delta,
                sharded_state_dict_keys_map=names,
            )
            mixed[place] = dataclasses.replace(layer, submodules=own)
    return mixed
