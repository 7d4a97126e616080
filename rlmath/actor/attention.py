"""Core attention for packed sequences where Transformer Engine is not installed.

Megatron's own ``DotProductAttention`` refuses packed sequences. This module accepts them in the
``thd`` format: the sequences of a micro-batch are concatenated in one row of ``t`` tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlmath.actor.context import ContextClass
from rlmath.device.cpu_ops import attend, rms_norm

if TYPE_CHECKING:
    from rlmath.actor.packing import SequenceRows

# Sequences are padded together if the shortest is at least this share of the longest, a balance of
# few kernel calls and little wasted work.
_MIN_LENGTH_SHARE = 0.75


@dataclass(frozen=True)
class LengthClass:
    """Sequences of similar length, padded to one rectangle."""

    # [n, l] int64, row in the pack of each token; padding repeats the sequence's last token, whose
    # output is discarded.
    rows: Tensor
    # Whether the rectangle is the pack itself: all sequences have one length and share nothing.
    whole: bool


@dataclass(frozen=True)
class Rectangles:
    """The sequences of a pack as rectangles."""

    classes: list[LengthClass]  # Rectangles; each sequence is in one.
    # [t] int64, place of each pack row's output in the concatenated rectangles. A sequence's output
    # for rows of another is discarded.
    places: Tensor


@dataclass
class LengthClassedSeqParams(PackedSeqParams):
    """Packed-sequence parameters with the rectangles that :class:`PackedAttention` works on.

    Where sequences share rows, ``cu_seqlens_q`` has the form for
    :class:`rlmath.device.cpu_ops.PackedRotary`.
    """

    rectangles: Rectangles | None = None


@dataclass
class ContextSeqParams(PackedSeqParams):
    """Packed-sequence parameters of ``PackedAttention`` under context parallelism."""

    context_classes: list[ContextClass] = field(default_factory=list)


def rectangles(sequences: Sequence[SequenceRows], device: torch.device) -> Rectangles:
    """Group the sequences of a pack by length. ``sequences``: in pack order. ``device``: device of
    the indices."""
    lengths = [one.length for one in sequences]
    ends = list(itertools.accumulate(one.own for one in sequences))
    shares = any(one.shared for one in sequences)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    places = torch.empty(ends[-1], dtype=torch.int64)
    classes: list[LengthClass] = []
    before = 0
    while order:
        longest = lengths[order[0]]
        members = [i for i in order if lengths[i] >= _MIN_LENGTH_SHARE * longest]
        order = order[len(members) :]
        size, shared, shared_start, end = (
            torch.tensor(numbers)[:, None]
            for numbers in (
                [lengths[i] for i in members],
                [sequences[i].shared for i in members],
                [sequences[i].shared_start for i in members],
                [ends[i] for i in members],
            )
        )
        column = torch.arange(longest)
        own = end - size + torch.minimum(column, size - 1)
        rows = torch.where(column < shared, shared_start + column, own)
        kept = ((column >= shared) & (column < size)).flatten().nonzero().squeeze(1)
        places[rows.flatten()[kept]] = before + kept
        before += rows.numel()
        whole = not shares and longest * len(lengths) == ends[-1] and len(members) == len(lengths)
        classes.append(LengthClass(rows.to(device), whole))
    return Rectangles(classes, places.to(device))


class PackedAttention(MegatronModule):
    """Causal attention of packed sequences with torch's operators.

    Replaces Megatron's ``DotProductAttention`` in the local layer spec. Has no parameters and no
    dropout.
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
        """Attend within each sequence. Returns ``[t, heads * dim]``.

        Args:
            query: ``[t, heads, dim]``; key and value: ``[t, kv_heads, dim]``; values may have
                another width, which the result then has.
        """
        assert packed_seq_params is not None, "PackedAttention takes packed sequences only"
        if isinstance(packed_seq_params, ContextSeqParams):
            context = self._over_ranks(query, key, value, packed_seq_params.context_classes)
        elif isinstance(packed_seq_params, LengthClassedSeqParams):
            assert packed_seq_params.rectangles is not None
            context = self._rectangles(query, key, value, packed_seq_params.rectangles)
        else:
            context = self._varlen(query, key, value, packed_seq_params)
        return context.reshape(query.size(0), -1)

    def _rectangles(self, query: Tensor, key: Tensor, value: Tensor, packed: Rectangles) -> Tensor:
        # The backward of index_select sums over repeated rows: the gradients of a shared key over
        # the sequences that attend to it. Padding adds 0, because nothing real attends to it.
        pieces = []
        for one in packed.classes:
            n = one.rows.size(0)
            if one.whole:
                q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (query, key, value))
                return (
                    attend(q, k, v, self._band(q), self.softmax_scale).transpose(1, 2).flatten(0, 1)
                )
            q, k, v = (
                x.index_select(0, one.rows.flatten()).unflatten(0, (n, -1)).transpose(1, 2)
                for x in (query, key, value)
            )
            pieces.append(
                attend(q, k, v, self._band(q), self.softmax_scale).transpose(1, 2).flatten(0, 1)
            )
        return torch.cat(pieces).index_select(0, packed.places)

    def _over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, classes: list[ContextClass]
    ) -> Tensor:
        """Attend with this context rank's queries to the gathered keys and values of all ranks."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        # The backward sums the ranks' gradients of a key on the rank that has it.
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
            pieces.append(attend(q, k, v, mask, self.softmax_scale).transpose(1, 2).flatten(0, 1))
        places = torch.cat([one.queries.flatten() for one in classes])
        return out.index_copy(0, places, torch.cat(pieces))

    def _band(self, query: Tensor) -> Tensor | None:
        """``[l, l]`` bool, true for keys that a query sees; ``None``: all keys before it."""
        length = query.size(2)
        if self.window is None or length <= self.window:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
        return seen.tril_().triu_(1 - self.window)

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

    Each tensor rank then normalizes its own tokens, so the ranks' gradients of the weight are
    partial and have to be summed; Megatron does so for parameters marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return self.normalize(x, self.weight)
        # In float32: 1 plus a small weight would be rounded to few bits of it.
        return self.normalize(x.float(), 1 + self.weight.float()).to(x.dtype)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize, and multiply by a weight."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class CpuRMSNorm(ParallelRMSNorm):
    """RMSNorm computed in fewer passes on a CPU."""

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, weight, self.eps)
