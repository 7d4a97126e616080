"""Responses in several turns: what the model did not sample takes no part in anything."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import RankStep
from rlmath.algorithms.aggregation import AGGREGATIONS, sequence_weights
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.batching.from_groups import sampled_sequences
from rlmath.batching.shards import ShardSettings, shards
from rlmath.rollout.lag import lag_metrics
from tests.support.samples import make_group, make_sample

# Model, glue, observation, model; and one turn.
TURNS = (("model", 0), ("glue", 3), ("observation", 4), ("model", 6))
MASK = [True] * 3 + [False] * 3 + [True] * 4


def sample(index=0, **changes):
    log_probs = np.where(MASK, -0.5, 0.0).astype(np.float32)
    fields = {"segments": TURNS, "log_probs": log_probs, "texts": ("a", "b", "c", "d")}
    return make_sample("p", index, range(10, 20), **fields | changes)


def plain(one):
    """The same sample without what it was told."""
    return one.model_part()


def sequences(samples, rewards=None):
    group = make_group(samples, rewards or [1.0, 0.0, 2.0][: len(samples)])
    return sampled_sequences([group], truncated=TruncatedRule.mask, mask_duplicates=False)


def test_the_loss_has_the_models_tokens_of_the_samples_that_take_part():
    samples = [sample(), sample(1, finish_reason="length"), make_sample("p", 2, 5)]
    found = sequences(samples)
    batch = found.select([2, 0, 1])
    assert batch.response_lengths.tolist() == [5, 10, 10]
    assert batch.loss_mask.tolist() == [True] * 5 + MASK + [False] * 10
    assert batch.model_mask.tolist() == [True] * 5 + MASK * 2
    assert found.loss_token_counts.tolist() == [7, 0, 5]
    assert batch.loss_token_counts.tolist() == [5, 7, 0]
    assert batch.model_lengths.tolist() == [5, 7, 7] == found.model_lengths[[2, 0, 1]].tolist()
    assert batch.part(1, 1).model_mask.tolist() == batch.select([1]).model_mask.tolist() == MASK
    one_turn = sequences([make_sample("p", 0, 5)]).select([0])
    assert one_turn.model_mask is None and one_turn.model_lengths.tolist() == [5]


def test_a_failed_sample_takes_no_part_even_where_rewards_are_not_read():
    group = make_group([sample(finish_reason="failed", failure="x"), sample(1)], [None, None])
    found = sampled_sequences(
        [group], truncated=TruncatedRule.keep, mask_duplicates=False, reads_rewards=False
    )
    assert found.takes_part.tolist() == [False, True]


@pytest.mark.parametrize("kind", AGGREGATIONS.names())
def test_every_aggregation_counts_the_models_tokens(kind):
    samples = [sample(), sample(1), make_sample("p", 2, 5)]
    found, wanted = (
        sequence_weights(kind, one.loss_token_counts, one.group_ids, 30)
        for one in (sequences(samples), sequences([plain(s) for s in samples]))
    )
    assert torch.equal(found, wanted)


def test_shards_carry_the_mask():
    found = sequences([sample(), make_sample("p", 1, 5), sample(2)])
    settings = ShardSettings(2, max_tokens_per_microbatch=60)
    for shard in pickle.loads(pickle.dumps(list(shards(found, settings)))):
        assert torch.equal(shard.batch.model_mask, found.select(shard.places.tolist()).model_mask)
        weights = shard.whole().weights
        assert not weights[~shard.batch.model_mask].any() and (weights > 0).sum() in (5, 7, 12, 14)


@pytest.mark.parametrize("stale_kv", [False, True])
def test_unsampled_tokens_are_not_compared(stale_kv):
    """Its log-probs are 0, which would be a difference of nats."""
    samples = [sample(), sample(1, finish_reason="length"), make_sample("p", 2, 5)]
    batch = sequences(samples).select(range(3))
    actor = torch.where(batch.model_mask, batch.engine_log_probs + 0.01, -7.0)
    found = Alignment.of_batch(batch, actor, torch.ones(25), 0, stale_kv=stale_kv)
    assert found.fresh.tokens == 19 and found.loss.tokens == 12
    assert found.fresh.abs_max == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(found.farthest[:, 0], torch.full((3,), 0.01).double())
    assert set(found.farthest[:2, 1].tolist()) <= {0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 9.0}


def with_gae(batch, plan, kl=None):
    step = SimpleNamespace(_policy=None)
    return RankStep._with_gae(step, batch, plan, kl)


def test_gae_skips_tokens_of_the_environment():
    samples = [sample(), make_sample("p", 1, 5), sample(2)]
    plan = StepPlan(advantage="gae", gamma=0.9, lam=0.8, kl_in_reward=0.3, whiten_advantages=False)
    draw = torch.Generator().manual_seed(0)
    batch = sequences(samples).select(range(3))
    values, kl = (torch.randn(25, generator=draw) for _ in range(2))
    found = with_gae(replace(batch, values=values), plan, kl)
    own = batch.model_mask
    alone = sequences([plain(s) for s in samples]).select(range(3))
    wanted = with_gae(replace(alone, values=values[own]), plan, kl[own])
    for name in ("advantages", "returns"):
        assert torch.equal(getattr(found, name)[own], getattr(wanted, name))
        assert not getattr(found, name)[~own].any()


def test_a_kl_in_the_reward_adds_up_over_the_models_tokens():
    samples = [sample(), sample(1)]
    batch = sequences(samples).select(range(2))
    alone = sequences([plain(s) for s in samples]).select(range(2))
    kl = torch.rand(20, generator=torch.Generator().manual_seed(1))
    own = batch.model_mask
    found = kl_in_reward(kl, batch.loss_mask, batch.response_lengths, 0.5)
    wanted = kl_in_reward(kl[own], alone.loss_mask, alone.response_lengths, 0.5)
    torch.testing.assert_close(found[own], wanted)


def test_ages_are_of_sampled_tokens():
    one = sample(spans=((0, 0), (2, 6)))
    found = lag_metrics([make_group([one], [1.0])], 2)
    assert found["rollout/lag_mean"] == pytest.approx(3 * 2 / 7)
