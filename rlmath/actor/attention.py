"""Core attention for packed sequences where Transformer Engine is not installed.

Megatron's own ``DotProductAttention`` refuses packed sequences. This one takes them in the ``thd``
format: the sequences of a micro-batch lie end to end in one row of ``t`` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlmath.actor.context import ContextClass
from rlmath.device.cpu_ops import rms_norm

# Sequences are padded together while the shortest is at least this share of the longest: few
# kernel calls against little wasted work.
_MIN_LENGTH_SHARE = 0.75


@dataclass(frozen=True)
class LengthClass:
    """Sequences of similar length, padded to one rectangle.

    Attributes:
        rows: ``[n, l]`` int64, position in the pack of each token; padding repeats a token of its
            own sequence, whose output is thrown away.
        whole: The rectangle is the pack itself: all sequences have one length.
        valid: ``[m]`` int64, flat places of the real tokens in ``[n * l]``.
        places: ``[m]`` int64, where those tokens stand in the pack.
    """

    rows: Tensor
    valid: Tensor
    places: Tensor
    whole: bool


@dataclass
class LengthClassedSeqParams(PackedSeqParams):
    """Packed-sequence parameters with the rectangles that :class:`PackedAttention` works on."""

    length_classes: list[LengthClass] = field(default_factory=list)


@dataclass
class ContextSeqParams(PackedSeqParams):
    """Packed-sequence parameters with what ``PackedAttention`` does under context parallelism."""

    context_classes: list[ContextClass] = field(default_factory=list)


def length_classes(lengths: list[int], device: torch.device) -> list[LengthClass]:
    """Group the sequences of a pack by length.

    Args:
        lengths: Length of each sequence in tokens, in pack order.
        device: Where the indices should live.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    classes: list[LengthClass] = []
    while order:
        longest = lengths[order[0]]
        members = [i for i in order if lengths[i] >= _MIN_LENGTH_SHARE * longest]
        order = order[len(members) :]
        size = torch.tensor([lengths[i] for i in members])
        start = torch.tensor([starts[i] for i in members])
        column = torch.arange(longest)
        real = column[None, :] < size[:, None]
        rows = start[:, None] + torch.minimum(column[None, :], size[:, None] - 1)
        classes.append(
            LengthClass(
                rows=rows.to(device),
                valid=real.flatten().nonzero().squeeze(1).to(device),
                places=rows[real].to(device),
                whole=longest * len(lengths) == starts[-1] and len(members) == len(lengths),
            )
        )
    return classes


# Autograd's own way back through an index is a sum over repeated rows, which a CPU does one by one.
# Here no sum is needed: the padding's gradient is 0, because nothing real attends to it.


class _ToRectangle(torch.autograd.Function):
    """``[t, heads, dim]`` to ``[n, l, heads, dim]`` of one length class."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, one: LengthClass) -> Tensor:
        ctx.length_class, ctx.num_tokens = one, packed.size(0)
        return packed.index_select(0, one.rows.flatten()).unflatten(0, tuple(one.rows.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        one: LengthClass = ctx.length_class
        grad = grads[0].flatten(0, 1)
        packed = grad.new_zeros(ctx.num_tokens, *grad.shape[1:])
        return packed.index_copy_(0, one.places, grad.index_select(0, one.valid)), None


class _FromRectangles(torch.autograd.Function):
    """``[n, l, heads, dim]`` of each length class to ``[t, heads, dim]``."""

    @staticmethod
    def forward(
        ctx: Any, num_tokens: int, classes: list[LengthClass], *rectangles: Tensor
    ) -> Tensor:
        ctx.classes = classes
        first = rectangles[0]
        packed = first.new_empty(num_tokens, *first.shape[2:])
        for one, rectangle in zip(classes, rectangles, strict=True):
            tokens = rectangle.flatten(0, 1).index_select(0, one.valid)
            packed.index_copy_(0, one.places, tokens)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        rectangles = []
        for one in ctx.classes:
            flat = grad.new_zeros(one.rows.numel(), *grad.shape[1:])
            flat.index_copy_(0, one.valid, grad.index_select(0, one.places))
            rectangles.append(flat.unflatten(0, tuple(one.rows.shape)))
        return None, None, *rectangles


class PackedAttention(MegatronModule):
    """Causal attention of packed sequences on ``scaled_dot_product_attention``.

    Takes the place of Megatron's ``DotProductAttention`` in the local layer spec. Has no
    parameters and no dropout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"PackedAttention is causal, asked for {attn_mask_type}")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window = None
        skipped: Any = config.window_attn_skip_freq
        if is_layer_window_attention(config.window_size, skipped, layer_number):
            assert config.window_size is not None
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: ``[t, heads, dim]``; key and value: ``[t, kv_heads, dim]``; values may have
                another width, which is then the result's.
            packed_seq_params: Where sequences begin and end.

        Returns:
            ``[t, heads * dim]``.
        """
        assert packed_seq_params is not None, "PackedAttention takes packed sequences only"
        if isinstance(packed_seq_params, ContextSeqParams):
            context = self._over_ranks(query, key, value, packed_seq_params.context_classes)
        elif isinstance(packed_seq_params, LengthClassedSeqParams):
            context = self._rectangles(query, key, value, packed_seq_params.length_classes)
        else:
            context = self._varlen(query, key, value, packed_seq_params)
        return context.reshape(query.size(0), -1)

    def _rectangles(
        self, query: Tensor, key: Tensor, value: Tensor, classes: list[LengthClass]
    ) -> Tensor:
        pieces = []
        for one in classes:
            if one.whole:
                n = one.rows.size(0)
                q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (query, key, value))
                return self._attend(q, k, v, self._band(q)).transpose(1, 2).flatten(0, 1)
            q, k, v = (_ToRectangle.apply(x, one).transpose(1, 2) for x in (query, key, value))
            pieces.append(self._attend(q, k, v, self._band(q)).transpose(1, 2))
        return _FromRectangles.apply(query.size(0), classes, *pieces)  # type: ignore[return-value]

    def _over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, classes: list[ContextClass]
    ) -> Tensor:
        """This context rank's queries against the keys and values of all ranks, brought here."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        # On the way back the ranks' gradients of a key are summed where the key is.
        keys, values = (
            gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
            for x in (key, value)
        )
        out = query.new_empty(*query.shape[:-1], value.size(-1))
        pieces = []
        for one in classes:
            q = query[one.queries].transpose(1, 2)
            k, v = (x[one.keys].transpose(1, 2) for x in (keys, values))
            mask = one.mask
            if self.window is not None:
                last = mask.sum(1, keepdim=True)
                mask = mask & (torch.arange(k.size(2), device=k.device) >= last - self.window)
            pieces.append(self._attend(q, k, v, mask).transpose(1, 2).flatten(0, 1))
        places = torch.cat([one.queries.flatten() for one in classes])
        return out.index_copy(0, places, torch.cat(pieces))

    def _band(self, query: Tensor) -> Tensor | None:
        """``[l, l]`` bool, which keys a query sees; ``None``: all before it."""
        length = query.size(2)
        if self.window is None or length <= self.window:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
        return seen.tril_().triu_(1 - self.window)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )


class ParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that Megatron accepts under sequence parallelism.

    Under it each tensor rank normalizes its own tokens, so the ranks' gradients of the weight are
    partial and have to be summed; Megatron does so for parameters that carry the mark
    ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CpuRMSNorm(ParallelRMSNorm):
    """The same, computed in fewer passes on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None and self.eps is not None
        return rms_norm(x, self.weight, self.eps)
