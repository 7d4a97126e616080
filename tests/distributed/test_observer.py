"""Observations of an update are right, and the same on every layout."""

import dataclasses

import pytest
import torch

from rlmath.actor.observer import UpdateObserver
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import response_rows
from rlmath.model.parallel import Layout
from tests.support.actors import build, make_batch, on_layouts

UPDATE = StepPlan(objective=ObjectiveSettings(loss="reinforce"), minibatches=2)


def other_batch(batch):
    """The same sequences with other advantages, which alone differ."""
    return dataclasses.replace(batch, advantages=batch.advantages.flip(0))


def run(layout, platform, model, batch, distributed):
    """Two updates, each on a new actor; the second one is compared with the first."""
    observer, found = None, []
    for one in (batch, other_batch(batch)):
        actor = build(layout, platform, model, optimizer={"distributed": distributed})
        observer = actor.observer = UpdateObserver(observer)
        whole = []
        if layout.world_size == 1:
            notice(actor, whole)
        result = actor.update(one, UPDATE, seed=3)
        observed = observer.finish(actor.optimizer, actor.reports)
        pulls = torch.zeros(int(batch.response_lengths.sum()))
        for each in observed.pulls:
            pulls[response_rows(each.places, batch.response_lengths)] = each.values
        norms = [each["grad_norm"] for each in result.minibatches]
        found.append((observed.gradients, observed.change, pulls, norms, whole))
    return found, actor.shard_of(batch, UPDATE, 3) if layout.world_size == 1 else None


def notice(actor, whole):
    """Keep each minibatch's gradient as Megatron's buffers have it, on a layout of one rank."""
    usual = actor.gradient_norm

    def gradient_norm():
        norm = usual()
        grads = [p.main_grad.double().flatten() for p in actor.module.parameters()]
        whole.append(torch.cat(grads).clone())
        return float(norm)

    actor.gradient_norm = gradient_norm


@pytest.fixture(scope="module")
def batch():
    made = make_batch()
    return dataclasses.replace(made, old_log_probs=made.engine_log_probs)


@pytest.fixture(scope="module")
def alone(ranks, tied_model, batch):
    return ranks.run(Layout(1, 1, 1), run, tied_model, batch, False)[0]


def test_gradients_are_compared_as_one_vector(alone):
    (first, second), _ = alone
    assert first[0][0].cosine is None and first[0][0].own == pytest.approx(first[3][0] ** 2)
    for place, products in enumerate(second[0]):
        a, b = first[4][place], second[4][place]
        assert products.earlier == pytest.approx(float(a @ a), rel=1e-9)
        assert products.own == pytest.approx(float(b @ b), rel=1e-9)
        cosine = float(a @ b / (a.norm() * b.norm()))
        assert products.cosine == pytest.approx(cosine, abs=1e-9) and abs(cosine) < 0.99
        assert products.own**0.5 == pytest.approx(second[3][place], rel=1e-5)


def test_the_pull_of_a_token_is_what_the_loss_says(alone, batch):
    """The pull of REINFORCE is its weight times its advantage, whatever the policy."""
    (first, second), shard = alone
    weights = torch.zeros_like(first[2])
    for share in shard.shares():
        rows = response_rows(share.places, batch.response_lengths)
        weights[rows] = share.weights
    assert batch.advantages is not None and bool(weights.any())
    for (*_, pulls, _, _), advantages in zip(
        (first, second), (batch.advantages, other_batch(batch).advantages), strict=True
    ):
        expected = weights * advantages
        torch.testing.assert_close(pulls, expected, rtol=1e-5, atol=1e-8)
    assert not first[2][~batch.loss_mask].any()


@on_layouts(first=1)
def test_observations_are_equal_on_layouts(layout, ranks, tied_model, batch, alone):
    results = [found for found, _ in ranks.run(layout, run, tied_model, batch, True)]
    for place, wanted in enumerate(alone[0]):
        for rank in results:
            gradients, change, *_ = rank[place]
            for one, other in zip((*gradients, change), (*wanted[0], wanted[1]), strict=True):
                for name in ("own", "earlier", "both"):
                    expected = getattr(other, name)
                    close = pytest.approx(expected, rel=1e-3, abs=1e-4 * other.own)
                    assert getattr(one, name) == close
        # Context ranks and the copies of tensor ranks do not report.
        pulls = sum(rank[place][2] for rank in results)
        torch.testing.assert_close(pulls, wanted[2], rtol=1e-4, atol=1e-7)
