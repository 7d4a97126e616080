"""Shard a step's sequences over data-parallel ranks, in packing order.

The split depends only on lengths, masks and groups: first minibatches, then the ranks' shares of
each, then their micro-batches. A rank's shard is stored in the order in which the rank packs it, so
a micro-batch is a slice. A rank has the same sequences from the log-probs to the update, so
per-token results stay on the rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlmath.algorithms.aggregation import sequence_weights
from rlmath.algorithms.ragged import repeat
from rlmath.batching.from_groups import SampledSequences
from rlmath.batching.minibatches import minibatches
from rlmath.batching.packing import assign, join_micro_batches
from rlmath.batching.shared_prompts import GroupedSequences, assign_sharing
from rlmath.types import MicroBatch, TrainingBatch
from rlmath.utils.setting import Options

# Sequences to shard: a batch, or the samples from which one can be made.
Sequences: TypeAlias = "TrainingBatch | SampledSequences"


@dataclass(frozen=True)
class ShardSettings:
    data_parallel: int  # Number of ranks.
    max_tokens_per_microbatch: int  # Token budget of a micro-batch.
    # Token budget of a micro-batch of a forward-only pass; None: it takes the update's
    # micro-batches.
    max_tokens_per_forward: int | None = None
    minibatches: int = 1  # Number of optimizer steps.
    seed: int = 0  # Seed of the split into minibatches.
    multiple_of: int = 1  # Divisor of a rank's number of micro-batches per minibatch.
    aggregation: str = "token_mean"  # As in sequence_weights.
    constant_length: int | None = None  # As in sequence_weights.
    aggregation_options: Options | None = None  # As in sequence_weights.
    # The actor computes a group's prompt once per micro-batch, so its sequences are kept together
    # (see assign_sharing).
    share_prompts: bool = False


@dataclass(frozen=True)
class Share:
    """A rank's sequences of one minibatch."""

    batch: TrainingBatch  # The batch of these sequences; shares the shard's memory.
    micro_batches: list[MicroBatch]  # Micro-batches, as many on every rank; indices into batch.
    # [R] float32, weights of the response tokens in the minibatch's loss, with the denominators of
    # the whole minibatch.
    weights: Tensor
    places: Tensor  # [N] int64, indices of the sequences in the step.


@dataclass(frozen=True)
class Shard:
    """A rank's sequences of a step, ordered by minibatch and micro-batch.

    Pickled, it has 8 bytes per token, one bit for the mask, and the routes if samples have any, in
    buffers that Ray keeps in shared memory: ranks of a node with the same shard read one copy.
    """

    batch: TrainingBatch  # The sequences.
    places: Tensor  # [N] int64, indices of the sequences in the step.
    weights: Tensor  # [N] float32, weight of a token of each sequence in its minibatch's loss.
    # For each minibatch, the number of sequences in each micro-batch.
    counts: tuple[tuple[int, ...], ...]
    # The number of sequences in each micro-batch of a forward-only pass; None: it takes the
    # update's.
    forward_counts: tuple[int, ...] | None = None

    def with_values(self, **values: Tensor | None) -> Shard:
        """The shard with other token values, by field names of ``TrainingBatch``."""
        return replace(self, batch=replace(self.batch, **values))

    def shares(self) -> Iterator[Share]:
        first = 0
        for counts in self.counts:
            yield self._share(first, counts)
            first += sum(counts)

    def whole(self) -> Share:
        """All minibatches as one, with the same micro-batches."""
        return self._share(0, [count for counts in self.counts for count in counts])

    def forward_share(self) -> Share:
        """All minibatches as one, with the micro-batches of a forward-only pass."""
        if self.forward_counts is None:
            return self.whole()
        return self._share(0, self.forward_counts)

    def _share(self, first: int, counts: Sequence[int]) -> Share:
        batch = self.batch.part(first, sum(counts))
        weights = repeat(self.weights[first : first + len(batch)], batch.response_lengths)
        lengths, micro_batches, start = batch.sequence_lengths.tolist(), [], 0
        for count in counts:
            end = start + count
            micro_batches.append(MicroBatch(tuple(range(start, end)), sum(lengths[start:end])))
            start = end
        return Share(
            batch,
            micro_batches,
            torch.where(batch.loss_mask, weights, 0.0),
            self.places[first : first + len(batch)],
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        batch = {f.name: getattr(self.batch, f.name) for f in fields(TrainingBatch)}
        mask = batch.pop("loss_mask")
        return {
            "batch": {name: None if v is None else v.numpy() for name, v in batch.items()},
            "mask": _pack_bits(mask),
            "tokens": mask.numel(),
            "places": state["places"].numpy(),
            "weights": state["weights"].numpy(),
            "counts": state["counts"],
            "forward_counts": state["forward_counts"],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        batch = {name: _tensor(value) for name, value in state["batch"].items()}
        mask = _unpack_bits(_tensor(state["mask"]), state["tokens"])
        vars(self).update(
            batch=TrainingBatch(**batch, loss_mask=mask),
            places=_tensor(state["places"]),
            weights=_tensor(state["weights"]),
            counts=state["counts"],
            forward_counts=state["forward_counts"],
        )


def shards(
    sequences: Sequences, settings: ShardSettings, only: int | None = None
) -> Iterator[Shard]:
    """The shard of each data-parallel rank, created lazily. Raises ValueError: as in
    :func:`assign_shards`.

    Args:
        only: Create only the shard of this rank.
    """
    for rows, weights, counts, forward in assign_shards(sequences, settings, only):
        places = torch.tensor(rows, dtype=torch.int64)
        yield Shard(sequences.select(rows), places, weights, counts, forward)


def assign_shards(
    sequences: Sequences, settings: ShardSettings, only: int | None = None
) -> Iterator[tuple[list[int], Tensor, tuple[tuple[int, ...], ...], tuple[int, ...] | None]]:
    """For each data-parallel rank: its sequences in order, the token weight of each,
    ``Shard.counts`` and ``Shard.forward_counts``. Raises ValueError: a minibatch has fewer
    sequences than ranks, or there are fewer than minibatches.
    """
    lengths = sequences.sequence_lengths.tolist()
    group_ids, token_counts = sequences.group_ids, sequences.loss_token_counts
    weights = torch.zeros(len(lengths))
    rows: list[list[int]] = [[] for _ in range(settings.data_parallel)]
    counts: list[list[tuple[int, ...]]] = [[] for _ in range(settings.data_parallel)]
    packed: list[list[MicroBatch]] = [[] for _ in range(settings.data_parallel)]
    for members in minibatches(group_ids.tolist(), settings.minibatches, settings.seed):
        own, groups = token_counts[members], group_ids[members]
        found = sequence_weights(
            settings.aggregation,
            own,
            groups,
            settings.constant_length,
            settings.aggregation_options,
        )
        weights[members] = found.float()
        own_lengths = [lengths[i] for i in members]
        ranks, budget = settings.data_parallel, settings.max_tokens_per_microbatch
        if settings.share_prompts:
            prompts = sequences.prompt_lengths[members].tolist()
            grouped = GroupedSequences(own_lengths, groups.tolist(), prompts)
            dealt = assign_sharing(grouped, ranks, budget, multiple_of=settings.multiple_of)
        else:
            dealt = assign(own_lengths, ranks, budget, multiple_of=settings.multiple_of)
        for rank, micro_batches in enumerate(dealt):
            rows[rank] += [members[i] for one in micro_batches for i in one.sequences]
            counts[rank].append(tuple(len(one.sequences) for one in micro_batches))
            packed[rank] += micro_batches
    forward: Sequence[tuple[int, ...] | None] = [None] * settings.data_parallel
    if settings.max_tokens_per_forward is not None:
        forward = join_micro_batches(packed, settings.max_tokens_per_forward, settings.multiple_of)
    for rank in range(settings.data_parallel) if only is None else (only,):
        own = torch.tensor(rows[rank], dtype=torch.int64)
        yield rows[rank], weights[own], tuple(counts[rank]), forward[rank]


def response_rows(places: Tensor, response_lengths: Tensor) -> Tensor:
    """``[r]`` int64, indices of these sequences' response tokens among a batch's ``R``."""
    ends = torch.cumsum(response_lengths, 0).tolist()
    starts = [0, *ends]
    pieces = [torch.arange(starts[i], ends[i]) for i in places.tolist()]
    return torch.cat(pieces)


def _pack_bits(mask: Tensor) -> Any:
    """Pack eight tokens into a byte."""
    import numpy as np

    return np.packbits(mask.numpy())


def _unpack_bits(packed: Tensor | None, count: int) -> Tensor:
    import numpy as np

    assert packed is not None
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).view(bool))


def _tensor(array: Any) -> Tensor | None:
    """A tensor on read-only memory."""
    if array is None:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
