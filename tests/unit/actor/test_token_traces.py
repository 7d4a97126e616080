"""Token traces of a sequence show what its minibatch's loss does to it."""

import dataclasses

import pytest
import torch

from rlmath.actor.token_traces import traces_of
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.losses import LOSSES
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.batching.shards import ShardSettings, shards
from tests.support.batches import loss_inputs

LENGTHS = (5, 3, 7, 2)


def share_of(generator):
    """Four sequences with everything that an update may read."""
    batch = batch_of_sequences([((1, 2), tuple(range(10, 10 + one))) for one in LENGTHS])
    count = sum(LENGTHS)

    def random():
        return torch.randn(count, generator=generator)

    old = -random().abs()
    mask = torch.ones(count, dtype=torch.bool)
    mask[6] = False
    batch = dataclasses.replace(
        batch,
        engine_log_probs=old + random() / 50,
        old_log_probs=old,
        ref_log_probs=old + random() / 10,
        advantages=torch.where(mask, random(), 0.0),
        policy_factors=(random() > -1).float(),
        loss_mask=mask,
    )
    shard = next(shards(batch, ShardSettings(1, 14), only=0))
    return next(shard.shares())


@pytest.mark.parametrize("loss", sorted(LOSSES.names()))
def test_pulls_are_the_slopes_of_the_whole_minibatch(loss):
    generator = torch.Generator().manual_seed(3)
    share = share_of(generator)
    batch = share.batch
    assert len(share.micro_batches) > 1
    # As of a later minibatch: the policy has moved.
    now = batch.old_log_probs + 0.4 * torch.randn(sum(LENGTHS), generator=generator)
    now.requires_grad_()
    entropy = torch.rand(sum(LENGTHS), generator=generator)
    settings = ObjectiveSettings(loss=loss, kl_coef=0.05)
    inputs = loss_inputs(share, now, entropy)
    policy_objective(inputs, settings).loss.backward()
    # The ranks have the values in the order of their micro-batches.
    order = torch.randperm(sum(LENGTHS), generator=generator)
    values = TokenValues(order, now.detach()[order], entropy[order])
    places = share.places.tolist()
    wanted = {places[1], places[2], 99}
    found = list(traces_of(share, values, settings, wanted, 1, False))
    assert [one.place for one in found] == places[1:3]
    for one in found:
        rows = inputs.sequence_ids == places.index(one.place)
        torch.testing.assert_close(one.values["pulls"], -now.grad[rows], rtol=1e-5, atol=1e-8)
        for name in ("old_log_probs", "advantages", "policy_factors", "loss_mask"):
            assert torch.equal(one.values[name], getattr(batch, name)[rows])
        assert torch.equal(one.values["log_probs"], now.detach()[rows])
        assert torch.equal(one.values["entropy"], entropy[rows])
        assert one.values["token_ids"].tolist() == list(range(10, 10 + int(rows.sum())))
        assert one.weight == float(share.weights[rows].max()) and one.minibatch == 1
        if loss == "ppo_clip":
            # Outside of the clip, on the side where the advantage would push further.
            ratio = (now.detach() - batch.old_log_probs)[rows].exp()
            advantages = batch.advantages[rows]
            out = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
            moving = batch.loss_mask[rows] & (batch.policy_factors[rows] != 0)
            assert torch.equal(one.values["clipped"], moving & out)
            assert bool(one.values["clipped"].any())


def test_unselected_sequences_are_not_traced():
    share = share_of(torch.Generator().manual_seed(0))
    zeros = torch.zeros(sum(LENGTHS))
    values = TokenValues(torch.arange(sum(LENGTHS)), zeros, zeros)
    assert not list(traces_of(share, values, ObjectiveSettings(), {99}, 0, False))
