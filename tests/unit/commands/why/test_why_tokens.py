"""The arithmetic of advantages by token is that of the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.actor.rank_step import DistillSettings, GaeSettings, RankStep, TokenSettings
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.peers import ALONE
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.batching.shards import ShardSettings, shards
from rlmath.commands.why.tokens import token_lines
from rlmath.config.load import load

LENGTHS = (4, 12, 3)
PLACE, REWARDS = 1, torch.tensor([1.0, -0.5, 2.0])


def of_ranks(settings: TokenSettings, advantages: SequenceAdvantages | None) -> Any:
    """What the ranks compute of three sequences, in the order of the step."""
    generator = torch.Generator().manual_seed(1)
    batch = batch_of_sequences([((1,), (2,) * one) for one in LENGTHS])
    shard = next(shards(batch, ShardSettings(1, 100), only=0))
    count = sum(LENGTHS)
    mask = torch.ones(count, dtype=torch.bool)
    mask[5] = False
    shard = shard.with_values(
        rewards=REWARDS[shard.places],
        loss_mask=mask,
        **{
            name: torch.randn(count, generator=generator)
            for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs", "values")
        },
    )
    policy: Any = SimpleNamespace(
        is_last_stage=True, reports=True, add=ALONE.add, gather=ALONE.gather
    )
    step = RankStep(policy, None, shard)
    step.finish(settings, advantages and advantages.select(shard.places))
    return step.shard


def lines_of(
    overrides: list[str],
    shard: Any,
    advantage: float | None,
    reward: float,
    whitened: bool,
) -> str:
    config = load(["experiment=quickstart", "model.path=tiny", "runner.run_dir=r", *overrides])
    at = shard.places.tolist().index(PLACE)
    ends = torch.cumsum(shard.batch.response_lengths, 0).tolist()
    rows = slice(ends[at] - LENGTHS[PLACE], ends[at])
    names = (
        *("old_log_probs", "ref_log_probs", "teacher_log_probs"),
        *("values", "advantages", "loss_mask"),
    )
    values = {name: getattr(shard.batch, name)[rows] for name in names}
    values["token_ids"] = torch.zeros(LENGTHS[PLACE])
    step: Any = SimpleNamespace(
        row={"reward": reward},
        update=SimpleNamespace(step=3, config=config),
        files=SimpleNamespace(metrics=[{"step": 3, "train/kl_coef": 0.125}]),
    )
    return "\n".join(token_lines(step, values, advantage, whitened))


KL = ["algorithm.kl_coef=0.5", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"]
PPO = ["algorithm.advantage=gae", "algorithm.group_size=1", "value.gamma=0.9", "value.lam=0.8"]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", [False, True])
def test_values(whiten: bool, kl: bool) -> None:
    settings = TokenSettings(kl_coef=0.125 if kl else None, gae=GaeSettings(0.9, 0.8, whiten))
    shard = of_ranks(settings, None)
    said = lines_of(PPO + KL * kl, shard, None, -0.5, whiten)
    assert ("whitened over the step: " if whiten else "equal to what the update used, ") in said
    assert "NOT" not in said and "4 more" in said
    assert ("times a coefficient of 0.125" in said) == kl
    # Another reward, or another coefficient, would not give these advantages.
    assert "NOT what the update used" in lines_of(PPO + KL * kl, shard, None, 0.5, whiten)


@pytest.mark.parametrize("whiten", [False, True])
def test_a_kl_in_the_reward(whiten: bool) -> None:
    advantages = SequenceAdvantages(
        torch.tensor([0.25, -1.5, 3.0]).double(), whiten_epsilon=1e-6 if whiten else None
    )
    shard = of_ranks(TokenSettings(kl_coef=0.125), advantages)
    said = lines_of(KL, shard, -1.5, -0.5, whiten)
    assert ("whitened over the step: " if whiten else "equal to what the update used, ") in said
    assert "NOT" not in said and "times a coefficient of 0.125" in said
    if not whiten:
        assert "NOT what the update used" in lines_of(KL, shard, 1.5, -0.5, whiten)


@pytest.mark.parametrize("whiten", [False, True])
def test_a_teacher(whiten: bool) -> None:
    """What it adds is added after the whitening."""
    advantages = SequenceAdvantages(
        torch.tensor([0.25, -1.5, 3.0]).double(), whiten_epsilon=1e-6 if whiten else None
    )
    settings = TokenSettings(distill=DistillSettings(0.5, 2.0))
    shard = of_ranks(settings, advantages)
    taught = ["algorithm.distill_coef=0.5", "algorithm.distill_clip=2"]
    said = lines_of(taught, shard, -1.5, -0.5, whiten)
    assert ("whitened over the step: " if whiten else "equal to what the update used, ") in said
    assert "NOT" not in said and "the teacher adds algorithm.distill_coef=0.5" in said
    assert "NOT" in lines_of(["algorithm.distill_coef=0.25"], shard, -1.5, -0.5, whiten)
