"""Convert graded groups to the sequences that the actor trains on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlmath.algorithms.advantages import ADVANTAGES, AdvantageSettings
from rlmath.algorithms.filters import TruncatedRule, duplicates, handle_truncated
from rlmath.algorithms.ragged import repeat
from rlmath.types import ONE_TURN, GradedSample, Group, Sample, TrainingBatch


@dataclass(frozen=True)
class SampledSequences:
    """The sequences of a step, as samples.

    Only lengths and other per-sequence numbers are arrays. Tokens and log-probs are copied once,
    into the batches of the ranks that train on them.
    """

    samples: tuple[GradedSample, ...]  # [N].
    prompts: tuple[NDArray[np.int32], ...]  # [N] int32 arrays of token ids.
    prompt_lengths: Tensor  # [N] int64, in tokens.
    response_lengths: Tensor  # [N] int64, in tokens.
    model_lengths: Tensor  # [N] int64, response tokens that the model sampled.
    group_ids: Tensor  # [N] int64; the same for sequences of one problem.
    weights_versions: Tensor  # [N] int64, version that sampled the last token of each sequence.
    rewards: Tensor  # [N] float32; 0 for unscored samples.
    takes_part: Tensor  # [N] bool, whether the sequence is in the loss.
    # [N] float32 arrays, for each response's tokens; None: no teacher.
    teacher_log_probs: tuple[NDArray[np.float32], ...] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sequence_lengths(self) -> Tensor:
        """``[N]`` int64, prompt plus response, in tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def loss_token_counts(self) -> Tensor:
        """``[N]`` int64, number of response tokens in the loss."""
        return torch.where(self.takes_part, self.model_lengths, 0)

    def select(self, indices: Sequence[int]) -> TrainingBatch:
        """The batch of these sequences, without advantages and the actor's log-probs."""
        rows = torch.as_tensor(list(indices), dtype=torch.int64)
        chosen = [(self.prompts[i], self.samples[i].sample) for i in rows.tolist()]
        tokens = [piece for prompt, sample in chosen for piece in (prompt, sample.token_ids)]
        responses, scored = self.response_lengths[rows], self.teacher_log_probs
        routes, route_lengths = _routes([s for _, s in chosen])
        loss_mask, model = repeat(self.takes_part[rows], responses), _model_mask(chosen)
        return TrainingBatch(
            tokens=_concatenate(tokens, np.int32),
            prompt_lengths=self.prompt_lengths[rows],
            response_lengths=responses,
            group_ids=self.group_ids[rows],
            weights_versions=self.weights_versions[rows],
            rewards=self.rewards[rows],
            engine_log_probs=_concatenate([s.log_probs for _, s in chosen], np.float32),
            loss_mask=loss_mask if model is None else loss_mask & model,
            token_ages=token_ages([s for _, s in chosen]),
            teacher_log_probs=None
            if scored is None
            else _concatenate([scored[i] for i in rows.tolist()], np.float32),
            routes=routes,
            route_lengths=route_lengths,
            model_mask=model,
        )


def sampled_sequences(
    groups: Sequence[Group],
    *,
    truncated: TruncatedRule,
    mask_duplicates: bool,
    reads_rewards: bool = True,
    teacher_log_probs: Sequence[NDArray[np.float32]] | None = None,
) -> SampledSequences:
    """The samples of all groups, in order.

    An unscored sample is kept, to preserve the batch size, but its tokens are masked if advantages
    come from rewards.

    Args:
        groups: At least one, each with at least one sample.
        truncated: ``mask`` also masks truncated responses. Their rewards still count in their
            group's statistics. (``penalize`` and ``scale`` are applied by
            ``apply_truncation_penalty``.)
        mask_duplicates: Mask later copies of a response in a group, among those not masked for
            another reason.
        reads_rewards: Whether advantages come from rewards.
        teacher_log_probs: Teacher's log-probs of each sample's tokens.
    """
    samples = tuple(sample for group in groups for sample in group.samples)
    rewards = torch.tensor([_number(s.reward) for s in samples], dtype=torch.float32)
    takes_part = torch.tensor(
        [s.sample.failure is None and (s.reward is not None or not reads_rewards) for s in samples]
    )
    if truncated is TruncatedRule.mask:
        takes_part &= handle_truncated(rewards, _truncation_flags(samples), truncated)[1]
    if mask_duplicates:
        sizes = [len(group.samples) for group in groups]
        for own, group in zip(takes_part.split(sizes), groups, strict=True):
            # Only unmasked ones count: a copy of a masked response must stay.
            places = own.nonzero()[:, 0].tolist()
            copies = duplicates([group.samples[i].sample.token_ids.tobytes() for i in places])
            own[places] = ~torch.tensor(copies, dtype=torch.bool)
    of_groups = [np.array(group.problem.prompt_token_ids, np.int32) for group in groups]
    group_ids = [i for i, group in enumerate(groups) for _ in group.samples]
    return SampledSequences(
        samples=samples,
        prompts=tuple(of_groups[i] for i in group_ids),
        prompt_lengths=torch.tensor([len(of_groups[i]) for i in group_ids]),
        response_lengths=torch.tensor([len(s.sample.token_ids) for s in samples]),
        model_lengths=torch.tensor([s.sample.model_tokens for s in samples]),
        group_ids=torch.tensor(group_ids),
        weights_versions=torch.tensor([s.sample.weights_version for s in samples]),
        rewards=rewards.nan_to_num(0.0),
        takes_part=takes_part,
        teacher_log_probs=None if teacher_log_probs is None else tuple(teacher_log_probs),
    )


def token_ages(samples: Sequence[Sample]) -> Tensor | None:
    if all(len(sample.spans) == 1 for sample in samples):
        return None
    return _concatenate([sample.token_ages() for sample in samples], np.uint8)


def _model_mask(chosen: Sequence[tuple[Any, Sample]]) -> Tensor | None:
    if all(sample.segments == ONE_TURN for _, sample in chosen):
        return None
    return _concatenate([sample.model_mask() for _, sample in chosen], np.bool_)


def _routes(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """See ``TrainingBatch.routes``, and ``TrainingBatch.route_lengths``."""
    found = [sample.routes for sample in samples if sample.routes is not None]
    if not found:
        return None, None
    lengths = [0 if sample.routes is None else len(sample.routes) for sample in samples]
    return torch.from_numpy(np.concatenate(found)), torch.tensor(lengths)


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: Any) -> Tensor:
    # With few sequences, a rank may have none.
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype))


def apply_truncation_penalty(
    group: Group, rule: TruncatedRule, penalty: float, factor: float
) -> Group:
    """Apply ``penalize`` or ``scale`` to the rewards of truncated responses.

    Call it before the group is filtered: a penalty may make equal rewards unequal.
    """
    samples = group.samples
    if rule not in (TruncatedRule.penalize, TruncatedRule.scale):
        return group
    rewards = torch.tensor([_number(s.reward) for s in samples], dtype=torch.float64)
    changed, _ = handle_truncated(rewards, _truncation_flags(samples), rule, penalty, factor)
    return Group(
        group.problem,
        tuple(
            s if s.reward is None else dataclasses.replace(s, reward=reward)
            for s, reward in zip(samples, changed.tolist(), strict=True)
        ),
    )


def _truncation_flags(samples: Sequence[GradedSample]) -> Tensor:
    """``[N]`` bool, whether a response was truncated."""
    return torch.tensor([s.sample.finish_reason == "length" for s in samples])


@dataclass(frozen=True)
class SampleRewards:
    """Rewards of a step's samples; NaN where unscored."""

    totals: Tensor  # [N] float32.
    separate: Tensor  # [N, K] float32, each reward before weighting.
    weights: Mapping[str, float]  # Weights of the K rewards by name, in order.

    @classmethod
    def of(cls, groups: Sequence[Group], weights: Mapping[str, float]) -> SampleRewards:
        """Collect the rewards of all samples of the groups, in order."""
        samples = [sample for group in groups for sample in group.samples]
        rows = [
            [_number(None if s.reward is None else s.rewards.get(name)) for name in weights]
            for s in samples
        ]
        return cls(
            torch.tensor([_number(s.reward) for s in samples], dtype=torch.float32),
            torch.tensor(rows, dtype=torch.float32).view(len(samples), len(weights)),
            weights,
        )


def estimator_rewards(rewards: SampleRewards, advantage: AdvantageSettings) -> Tensor:
    """Rewards for the estimator: totals ``[N]``, or separate rewards ``[N, K]`` without those
    that are only logged."""
    if not ADVANTAGES.traits(advantage.name).each_reward or not advantage.reward_weights:
        return rewards.totals
    names = list(rewards.weights)
    return rewards.separate[:, [names.index(name) for name in advantage.reward_weights]]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
