"""From graded groups to the batch that the actor trains on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlmath.algorithms.advantages import AdvantageSettings
from rlmath.algorithms.filters import TruncatedRule, duplicates, handle_truncated
from rlmath.types import GradedSample, Group, TrainingBatch


def training_batch(
    groups: Sequence[Group],
    *,
    truncated: TruncatedRule,
    mask_duplicates: bool,
) -> TrainingBatch:
    """Concatenate the samples of all groups, without padding.

    A sample without a reward is kept, so that the batch keeps its size, but its tokens are masked.

    Args:
        groups: At least one, each with at least one sample.
        truncated: With ``mask``, truncated responses are masked as well. Their rewards still count
            in their group's statistics. (``penalize`` and ``scale`` are applied by
            ``apply_truncation_penalty``.)
        mask_duplicates: Mask later copies of the same response in a group.

    Returns:
        The batch, without advantages and without old and reference log-probs.
    """
    samples = [sample for group in groups for sample in group.samples]
    prompts = [group.problem.prompt_token_ids for group in groups for _ in group.samples]
    group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.samples])
    rewards = torch.tensor([_number(s.reward) for s in samples], dtype=torch.float32)
    responses = torch.tensor([len(s.sample.token_ids) for s in samples])
    takes_part = torch.tensor([s.reward is not None for s in samples])
    if truncated is TruncatedRule.mask:
        takes_part &= handle_truncated(rewards, _truncated(samples), truncated)[1]
    if mask_duplicates:
        copies = [
            is_copy
            for group in groups
            for is_copy in duplicates([s.sample.token_ids for s in group.samples])
        ]
        takes_part &= ~torch.tensor(copies)
    loss_mask = torch.repeat_interleave(takes_part, responses)
    tokens = [
        piece
        for prompt, graded in zip(prompts, samples, strict=True)
        for piece in (np.array(prompt, np.int32), graded.sample.token_ids)
    ]
    log_probs = np.concatenate([s.sample.log_probs for s in samples], dtype=np.float32)
    return TrainingBatch(
        tokens=torch.from_numpy(np.concatenate(tokens, dtype=np.int32)),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_lengths=responses,
        group_ids=group_ids,
        weights_versions=torch.tensor([s.sample.weights_version for s in samples]),
        rewards=rewards.nan_to_num(0.0),
        engine_log_probs=torch.from_numpy(log_probs),
        loss_mask=loss_mask,
    )


def apply_truncation_penalty(
    group: Group, rule: TruncatedRule, penalty: float, factor: float
) -> Group:
    """The group with the rewards of truncated responses changed by ``penalize`` or ``scale``.

    Apply it before the group is filtered: with a penalty, equal rewards may become unequal.
    """
    samples = group.samples
    if rule not in (TruncatedRule.penalize, TruncatedRule.scale):
        return group
    rewards = torch.tensor([_number(s.reward) for s in samples], dtype=torch.float64)
    changed, _ = handle_truncated(rewards, _truncated(samples), rule, penalty, factor)
    return Group(
        group.problem,
        tuple(
            s if s.reward is None else dataclasses.replace(s, reward=reward)
            for s, reward in zip(samples, changed.tolist(), strict=True)
        ),
    )


def _truncated(samples: Sequence[GradedSample]) -> Tensor:
    """``[N]`` bool, whether a response was truncated."""
    return torch.tensor([s.sample.finish_reason == "length" for s in samples])


def estimator_rewards(groups: Sequence[Group], advantage: AdvantageSettings) -> Tensor:
    """What the estimator reads: totals ``[N]``, or for ``gdpo`` each reward separately ``[N, K]``.

    NaN where nothing could score a sample, or one of its rewards.
    """
    samples = [sample for group in groups for sample in group.samples]
    names = list(advantage.reward_weights) if advantage.name == "gdpo" else []
    if not names:
        return torch.tensor([_number(s.reward) for s in samples], dtype=torch.float32)
    rows = [
        [_number(None if s.reward is None else s.rewards.get(name)) for name in names]
        for s in samples
    ]
    return torch.tensor(rows, dtype=torch.float32)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
