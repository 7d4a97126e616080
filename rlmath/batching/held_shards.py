"""A rank's sequences of a step whose token ids and log-probs are in blocks elsewhere.

The driver sends what is one number a sequence, the prompts, and where the responses are. The rank
gets the blocks from the nodes that have them (``rlmath.utils.array_refs``), and copies its own
responses out of them, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlmath.algorithms.ragged import repeat
from rlmath.batching.from_groups import SampledSequences, token_ages
from rlmath.batching.shards import Shard, ShardSettings, dealt
from rlmath.types import TrainingBatch
from rlmath.utils.array_refs import ArrayRef


@dataclass(frozen=True)
class HeldShard:
    """A :class:`Shard` without its responses.

    Attributes:
        shard: Its tokens are the prompts alone; it has no log-probs and no loss mask.
        takes_part: ``[N]`` bool, whether the sequence is in the loss.
        places: ``[N, 3]`` int64, of each response its block, counted from 0, and where in it its
            token ids and its log-probs begin.
        own: The last block, of responses whose arrays the driver has; empty where it has none.
    """

    shard: Shard
    takes_part: NDArray[np.bool_]
    places: NDArray[np.int64]
    own: NDArray[np.int32]

    def filled(self, blocks: Sequence[NDArray[np.int32]]) -> Shard:
        """The shard.

        Args:
            blocks: Of int32, as :func:`held_shards` gave them.
        """
        given, batch = [*blocks, self.own], self.shard.batch
        counts = batch.response_lengths.tolist()
        ends = np.cumsum(batch.prompt_lengths.numpy())
        prompts = np.split(batch.tokens.numpy(), ends[:-1]) if len(ends) else []
        tokens: NDArray[np.int32] = np.empty(int(batch.sequence_lengths.sum()), np.int32)
        log_probs = np.empty(sum(counts), np.int32)
        at = response = 0
        for prompt, count, (block, first, second) in zip(
            prompts, counts, self.places.tolist(), strict=True
        ):
            tokens[at : at + len(prompt)] = prompt
            at += len(prompt) + count
            tokens[at - count : at] = given[block][first : first + count]
            log_probs[response : response + count] = given[block][second : second + count]
            response += count
        return self.shard.with_values(
            tokens=torch.from_numpy(tokens),
            engine_log_probs=torch.from_numpy(log_probs.view(np.float32)),
            loss_mask=repeat(torch.from_numpy(self.takes_part.copy()), batch.response_lengths),
        )


def are_held(sequences: Any) -> TypeGuard[SampledSequences]:
    """Whether responses of these sequences are elsewhere."""
    return isinstance(sequences, SampledSequences) and any(
        isinstance(one.sample.token_ids, ArrayRef) for one in sequences.samples
    )


def held_shards(
    sequences: SampledSequences, settings: ShardSettings
) -> Iterator[tuple[HeldShard, list[Any]]]:
    """What :func:`rlmath.batching.shards.shards` makes, without responses that are elsewhere.

    Returns:
        For each data-parallel rank what it is sent, and the references to the blocks that it needs.
    """
    for rows, weights, counts in dealt(sequences, settings):
        yield _held(sequences, rows, weights, counts)


def held_whole(sequences: SampledSequences) -> tuple[HeldShard, list[Any]]:
    """All sequences in their order, in no minibatch, and the references to their blocks."""
    return _held(sequences, range(len(sequences)), torch.zeros(len(sequences)), ())


def _held(
    sequences: SampledSequences,
    rows: Sequence[int],
    weights: Tensor,
    counts: tuple[tuple[int, ...], ...],
) -> tuple[HeldShard, list[Any]]:
    places, blocks, own = _places(sequences, rows)
    chosen = torch.as_tensor(list(rows), dtype=torch.int64)
    shard = Shard(_without_responses(sequences, chosen), chosen, weights, counts)
    return HeldShard(shard, sequences.takes_part[chosen].numpy(), places, own), blocks


def _places(
    sequences: SampledSequences, rows: Sequence[int]
) -> tuple[NDArray[np.int64], list[Any], NDArray[np.int32]]:
    """``HeldShard.places``, the references, and ``HeldShard.own``."""
    samples = [sequences.samples[row].sample for row in rows]
    numbers: dict[Any, int] = {}
    for sample in samples:
        if isinstance(sample.token_ids, ArrayRef):
            numbers.setdefault(sample.token_ids.block, len(numbers))
    own: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    found, start = [], 0
    for sample in samples:
        tokens, log_probs = sample.token_ids, sample.log_probs
        if isinstance(tokens, ArrayRef) and isinstance(log_probs, ArrayRef):
            found.append((numbers[tokens.block], tokens.start, log_probs.start))
            continue
        count = len(tokens)
        own += [np.asarray(tokens, np.int32), np.asarray(log_probs, np.float32).view(np.int32)]
        found.append((len(numbers), start, start + count))
        start += 2 * count
    places = np.array(found, np.int64).reshape(len(rows), 3)
    return places, list(numbers), np.concatenate(own)


def _without_responses(sequences: SampledSequences, chosen: Tensor) -> TrainingBatch:
    rows = chosen.tolist()
    prompts = [np.empty(0, np.int32), *(sequences.prompts[row] for row in rows)]
    return TrainingBatch(
        tokens=torch.from_numpy(np.concatenate(prompts)),
        prompt_lengths=sequences.prompt_lengths[chosen],
        response_lengths=sequences.response_lengths[chosen],
        group_ids=sequences.group_ids[chosen],
        weights_versions=sequences.weights_versions[chosen],
        rewards=sequences.rewards[chosen],
        engine_log_probs=torch.empty(0),
        loss_mask=torch.empty(0, dtype=torch.bool),
        token_ages=token_ages([sequences.samples[row].sample for row in rows]),
    )
