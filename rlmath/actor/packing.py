"""Pack the sequences of a micro-batch into one row of tokens for the model.

Adjacent sequences with the same prompt can share it: the row has the prompt once, without its last
token, and then for each sequence the prompt's last token and the response. The last token is not
shared because each sequence predicts a different first response token from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlmath.actor.context import ContextShare, context_classes, context_share, own_positions
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.types import MicroBatch, TrainingBatch


@dataclass(frozen=True)
class SequenceRows:
    """Rows of a pack with a sequence's tokens."""

    own: int  # Number of rows of this sequence, after those of the previous sequence.
    shared: int = 0  # Number of preceding tokens, which are in rows of an earlier sequence.
    shared_start: int = 0  # First of the shared rows.

    @property
    def length(self) -> int:
        return self.shared + self.own


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch as one row of ``t`` tokens, ``r`` of which are response tokens.

    Under context parallelism each rank has its share of the tokens, and ``context`` describes how
    to all-gather the values of the shares.
    """

    # [1, t] int64, padded with one more sequence to a multiple of the tensor ranks (with FP8: of
    # their token blocks).
    tokens: Tensor
    # [1, t] int64, from 0 in each sequence; its own rows continue after those that it shares.
    position_ids: Tensor
    packed_seq_params: Any  # Boundaries of sequences, and the rows that they share.
    rows: Tensor  # [r] int64, positions whose logits predict response tokens.
    targets: Tensor  # [r] int64, those response tokens.
    sequence_ids: Tensor  # [r] int64, index of each token's sequence in the micro-batch.
    response_rows: Tensor  # [r] int64 on the CPU, indices among the batch's R.
    # None without context parallelism. Otherwise rows and targets are this rank's, the other fields
    # are of all ranks.
    context: ContextShare | None = None
    num_sequences: int | None = None  # Number of sequences; None: as many as in sequence_ids.
    # Number of tokens on all context ranks, without padding, shared ones once; without context
    # parallelism the row starts with them.
    text_tokens: int = 0


def pack(
    batch: TrainingBatch,
    micro_batch: MicroBatch,
    platform: Platform,
    layout: Layout,
    cp_rank: int = 0,
    rows_per_rank: int = 1,
    share_prompts: bool = False,
) -> PackedMicroBatch:
    """Concatenate the sequences of a micro-batch.

    Args:
        batch: The batch that ``micro_batch.sequences`` index.
        layout: The row's length is padded to a multiple of its tensor ranks, each sequence's for
            its context ranks.
        cp_rank: This process's context rank.
        rows_per_rank: Divisor of the tokens of each tensor rank (``Fp8Training.block``).
        share_prompts: A sequence with the same prompt as the previous one shares its rows;
            :func:`rlmath.config.shared_prompts.sharing_problem` tells where this is possible.
    """
    device, contexts = platform.torch_device, layout.context_parallel
    # Context ranks split each sequence into two pieces each; tensor ranks share a rank's part.
    piece = 2 * contexts if contexts > 1 else 1
    shared = layout.tensor_parallel * rows_per_rank
    multiple_of = contexts * math.lcm(piece // contexts, shared)
    found = _rows_of(batch, list(micro_batch.sequences), piece, share_prompts)
    tokens, sequences = found.tokens, found.sequences
    # An empty micro-batch must also go through the model, so all ranks take part in the same
    # collectives.
    padding = -found.offset % multiple_of if found.offset else multiple_of
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        sequences.append(SequenceRows(padding))
    row = torch.cat(tokens)
    position_ids = torch.cat([torch.arange(one.shared, one.length) for one in sequences])
    sizes = [one.own for one in sequences]
    own_rows, own_targets, context = _cat(found.rows), _cat(found.targets), None
    if contexts > 1:
        mine = own_positions(sizes, contexts, cp_rank)
        row, position_ids = row[mine], position_ids[mine]
        context, chosen, own_rows = context_share(sizes, contexts, cp_rank, own_rows)
        own_targets = own_targets[chosen]
    return PackedMicroBatch(
        tokens=row[None].to(device),
        position_ids=position_ids[None].to(device),
        packed_seq_params=_packed_seq_params(sequences, platform, contexts, cp_rank),
        rows=own_rows.to(device),
        targets=own_targets.to(device),
        sequence_ids=_cat(found.sequence_ids).to(device),
        response_rows=_cat(found.response_rows),
        context=context.to(device) if context else None,
        num_sequences=len(micro_batch.sequences),
        text_tokens=found.text_tokens,
    )


@dataclass
class _Rows:
    """Pieces of a pack, one of each sequence; see :class:`PackedMicroBatch`."""

    tokens: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    sequence_ids: list[Tensor] = field(default_factory=list)
    response_rows: list[Tensor] = field(default_factory=list)
    sequences: list[SequenceRows] = field(default_factory=list)
    offset: int = 0  # Rows so far, padding included.
    text_tokens: int = 0


def _rows_of(batch: TrainingBatch, indices: list[int], piece: int, share_prompts: bool) -> _Rows:
    """Lay sequences end to end, each padded to a multiple of ``piece``."""
    found, lengths, responses = _Rows(), batch.sequence_lengths, batch.response_lengths
    starts = (lengths.cumsum(0) - lengths, responses.cumsum(0) - responses)
    columns = torch.stack([*starts, batch.prompt_lengths, responses])[:, indices]
    shared_prompt, shared_start = torch.empty(0, dtype=torch.int64), 0
    for place, (start, first, prompt, response) in enumerate(columns.t().tolist()):
        size = prompt + response
        sequence, shared = batch.tokens[start : start + size].long(), 0
        if share_prompts and torch.equal(sequence[: prompt - 1], shared_prompt):
            shared = prompt - 1
        else:
            shared_prompt, shared_start = sequence[: prompt - 1], found.offset
        own = size - shared
        found.tokens.append(sequence[shared:])
        # The logits at a position predict the next token.
        end = found.offset + own
        found.rows.append(torch.arange(end - response - 1, end - 1))
        found.targets.append(sequence[prompt:])
        found.sequence_ids.append(torch.full((response,), place))
        found.response_rows.append(torch.arange(first, first + response))
        padding = -own % piece
        if padding:
            # After the sequence's end, which causal attention never sees.
            found.tokens.append(torch.zeros(padding, dtype=torch.int64))
        found.sequences.append(SequenceRows(own + padding, shared, shared_start))
        found.offset += own + padding
        found.text_tokens += own
    return found


def _cat(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def _packed_seq_params(
    sequences: list[SequenceRows], platform: Platform, contexts: int, cp_rank: int
) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    from rlmath.actor.attention import ContextSeqParams, LengthClassedSeqParams, rectangles

    device, sizes = platform.torch_device, [one.own for one in sequences]
    ends = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
    if any(one.shared for one in sequences):
        # Megatron passes no other field of a pack to the rotary embedding (PackedRotary).
        ends = torch.stack([ends, ends.new_tensor([*(one.shared for one in sequences), 0])])
    longest = max(one.length for one in sequences)
    common: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if contexts > 1 and platform.layer_spec != "transformer_engine":
        classes = [one.to(device) for one in context_classes(sizes, contexts, cp_rank)]
        return ContextSeqParams(**common, context_classes=classes)
    if platform.name == "cpu":
        return LengthClassedSeqParams(**common, rectangles=rectangles(sequences, device))
    return PackedSeqParams(**common)
