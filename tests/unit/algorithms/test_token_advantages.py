"""From groups to an advantage per token; a KL penalty lands in its place."""

import math

import pytest
import torch

from rlmath.algorithms.advantages import (
    ADVANTAGES,
    AdvantageSettings,
    get_advantage,
    sequence_advantages,
    token_advantages,
)
from rlmath.algorithms.advantages.grpo import GrpoOptions
from rlmath.algorithms.advantages.pass_at_k import PassAtKOptions
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.batching.from_groups import SampleRewards, estimator_rewards, sampled_sequences
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_group, make_sample

REWARDS = torch.tensor([5.0, -5.0, -5.0, 5.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1])
LENGTHS = torch.tensor([2, 1, 3, 1, 2])
MASK = torch.ones(9, dtype=torch.bool)


def advantages(name, token_rewards=None, mask=MASK, whiten_tokens=False, **options):
    settings = AdvantageSettings(
        name, ADVANTAGES.options(name)(**options), whiten_tokens=whiten_tokens
    )
    counts = torch.tensor([int(own.sum()) for own in mask.split(LENGTHS.tolist())])
    found = sequence_advantages(
        REWARDS, GROUPS, counts, settings, token_rewards=token_rewards is not None
    )
    return token_advantages(found, LENGTHS, mask, token_rewards).double()


def group(*rewards, cut_off=()):
    problem = Problem("p", "?", (1, 2), ("2",))
    samples = []
    for index, given in enumerate(rewards):
        total = None if given is None else sum(given.values())
        reason = "length" if index in cut_off else "stop"
        sample = make_sample("p", index, [7] * (index + 1), log_probs=-0.5, finish_reason=reason)
        samples.append(GradedSample(sample, total, None, "ungraded", rewards=given or {}))
    return Group(problem, tuple(samples))


def test_one_advantage_for_all_tokens_of_a_sequence():
    expected = get_advantage("grpo")(REWARDS, GROUPS, GrpoOptions())
    got = advantages("grpo")
    assert torch.allclose(got, torch.repeat_interleave(expected, LENGTHS), atol=1e-6)


def test_options_reach_their_estimator():
    # Others' mean of the first sample is -5, so 10 instead of 20/3: 3/2 of it.
    plain, left_out = advantages("grpo"), advantages("grpo", leave_one_out=True)
    assert torch.allclose(left_out[:6], 1.5 * plain[:6], atol=1e-6)
    one = get_advantage("pass_at_k")(REWARDS, GROUPS, PassAtKOptions(k=2))
    assert torch.allclose(
        advantages("pass_at_k", k=2), torch.repeat_interleave(one, LENGTHS), atol=1e-6
    )
    assert not torch.equal(advantages("pass_at_k", k=1), advantages("pass_at_k"))


def test_epsilon_reaches_the_estimators_that_divide():
    for name in ("grpo", "batch_std", "gdpo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"):
        options = {"k": 2} if name == "pass_at_k" else {}
        small, large = (advantages(name, epsilon=e, **options) for e in (1e-6, 10.0))
        nonzero = small != 0
        assert nonzero.any() and (large[nonzero].abs() < 0.7 * small[nonzero].abs()).all(), name
    for name in ("dr_grpo", "rloo"):
        with pytest.raises(TypeError, match="epsilon"):
            advantages(name, epsilon=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch_std", "pass_at_k"])
def test_whitening_over_the_tokens_of_the_loss(name):
    """After the estimator: long sequences count more, and masked tokens neither count nor move."""
    mask = MASK.clone()
    mask[4] = False
    options = {"k": 2} if name == "pass_at_k" else {}
    plain = advantages(name, mask=mask, **options)[mask]
    got = advantages(name, mask=mask, whiten_tokens=True, **options)
    want = (plain - plain.mean()) / (plain.std() + 1e-6)
    assert torch.allclose(got[mask], want, atol=1e-5)
    assert float(got[4]) == 0.0
    assert float(got[mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(got[mask].std()) == pytest.approx(1.0, abs=1e-5)


def test_whitening_takes_a_kl_penalty_in():
    penalty = torch.linspace(-1, 0, 9)
    got = advantages("grpo", penalty, whiten_tokens=True)
    plain = advantages("grpo", penalty)
    assert torch.allclose(got, (plain - plain.mean()) / (plain.std() + 1e-6), atol=1e-5)


def test_a_kl_penalty_by_hand():
    """Costs 1, 2 and 3 nats on the last three-token sequence, weight 0.1."""
    kl = torch.tensor([0.0, 0, 0, 1, 2, 3, 0, 0, 0], dtype=torch.float64)
    masked = MASK & (torch.arange(9) != 4)
    assert kl_in_reward(kl, masked, LENGTHS, 0.1)[3:6].tolist() == pytest.approx([-0.4, 0, -0.3])
    penalty = kl_in_reward(kl, MASK, LENGTHS, 0.1)
    assert penalty.tolist() == pytest.approx([0, 0, 0, -0.6, -0.5, -0.3, 0, 0, 0])
    difference = advantages("dr_grpo", penalty) - advantages("dr_grpo")
    assert difference.tolist() == pytest.approx(penalty.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_kl_penalty_is_whitened_with_the_reward(name):
    mask = MASK.clone()
    mask[4] = False
    penalty = torch.linspace(-0.4, 0.4, 9, dtype=torch.float64)
    baseline = [0.0] * 5 if name == "reinforce_pp" else [-5 / 3] * 3 + [5.0] * 2
    raw = [
        float(REWARDS[i]) - baseline[i] + float(penalty[t])
        for t, i in enumerate([0, 0, 1, 2, 2, 2, 3, 4, 4])
    ]
    kept = [v for v, m in zip(raw, mask.tolist(), strict=True) if m]
    mean = sum(kept) / 8
    std = math.sqrt(sum((v - mean) ** 2 for v in kept) / 7)
    expected = [
        (v - mean) / (std + 1e-6) if m else 0.0 for v, m in zip(raw, mask.tolist(), strict=True)
    ]
    assert advantages(name, penalty, mask).tolist() == pytest.approx(expected, abs=1e-6)
    # Without a penalty it is the estimator itself.
    zero = torch.zeros(9, dtype=torch.float64)
    assert torch.allclose(advantages(name, zero, mask)[mask], advantages(name, None, mask)[mask])


def rewards_of(groups, settings):
    return estimator_rewards(SampleRewards.of(groups, settings.reward_weights), settings)


def of_batch(batch, groups, settings):
    rewards = rewards_of(groups, settings)
    counts = batch.loss_token_counts
    found = sequence_advantages(rewards, batch.group_ids, counts, settings)
    return token_advantages(found, batch.response_lengths, batch.loss_mask)


def training_batch(groups, **rules):
    return sampled_sequences(groups, **rules).select(range(sum(len(g.samples) for g in groups)))


def test_gdpo_reads_each_reward_on_its_own():
    """1 + 0 and 0 + 1 add up to the same; separately, with weights 3 and 1, they do not."""
    both = group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, None)
    settings = AdvantageSettings("gdpo", reward_weights={"a": 3.0, "b": 1.0})
    table = rewards_of([both], settings)
    assert table[:3].tolist() == [[1, 0], [0, 1], [0, 0]] and table[3].isnan().all()
    batch = training_batch([both], truncated=TruncatedRule.keep, mask_duplicates=False)
    found = of_batch(batch, [both], settings)
    first, second = float(found[0]), float(found[1])
    assert first > second > float(found[3])
    assert found[6:].tolist() == [0.0] * 4 and not batch.loss_mask[6:].any()
    assert batch.rewards.tolist() == [1, 1, 0, 0]


def test_truncated_responses_count_in_the_statistics_but_not_in_the_loss():
    cut = group({"a": 1.0}, {"a": 0.0}, {"a": 0.0}, cut_off=(1,))
    batch = training_batch([cut], truncated=TruncatedRule.mask, mask_duplicates=False)
    assert batch.loss_mask.tolist() == [True, False, False, True, True, True]
    found = of_batch(batch, [cut], AdvantageSettings("dr_grpo"))
    assert found[0] == pytest.approx(2 / 3)


def test_later_copies_of_a_response_can_be_masked():
    samples = [make_sample("p", i, ids) for i, ids in enumerate([(3, 4), (3, 5), (3, 4)])]
    both = [make_group(samples, [1.0, 0.0, 1.0])] * 2
    batch = training_batch(both, truncated=TruncatedRule.keep, mask_duplicates=True)
    # In each group the third response; the second group's first is no copy of the first group's.
    assert batch.loss_mask.tolist() == [True, True, True, True, False, False] * 2
    found = of_batch(batch, both, AdvantageSettings("dr_grpo"))
    assert found[:3].tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3])
