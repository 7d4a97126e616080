"""The second formula of each sequence's gradient, against autograd of the objective."""

import dataclasses

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.second_gradient import KL_SLOPES, SLOPES, second_gradients
from rlmath.algorithms.correction import CorrectionConfig, correct
from rlmath.algorithms.losses import LOSSES
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share
from tests.support.actors import make_batch
from tests.support.batches import loss_inputs

CORRECTIONS = ["token_truncate", "token_mask", "seq_truncate", "seq_mask_geometric", "seq_mask_sum"]


def share_of(plan, spread=0.3):
    """A share with log-probs that are far from the old ones, and its policy factors."""
    batch, draw = make_batch(), torch.Generator().manual_seed(3)
    count = batch.loss_mask.numel()

    def near(values, size):
        return values + size * torch.randn(count, generator=draw)

    log_probs = near(torch.full((count,), -2.0), 0.5)
    old = near(log_probs, spread)
    batch = dataclasses.replace(
        batch,
        old_log_probs=old,
        engine_log_probs=near(old, 0.5),
        ref_log_probs=near(old, 0.5),
        advantages=near(torch.zeros(count), 1.0),
    )
    if plan.correction is not None:
        found = correct(
            *(old, batch.engine_log_probs, batch.loss_mask, batch.response_lengths), plan.correction
        )
        batch = dataclasses.replace(batch, policy_factors=found.weights.float())
    weights = torch.rand(count, generator=draw)
    return Share(batch, [], weights, torch.arange(len(batch))), log_probs


def by_autograd(share, log_probs, plan, by_place=False):
    batch, own = share.batch, log_probs.clone().requires_grad_()
    inputs = loss_inputs(share, own)
    policy_objective(inputs, plan.objective).loss.backward()
    given = own.grad.double()
    if by_place:
        within = [torch.arange(1, n + 1) / n for n in batch.response_lengths.tolist()]
        given = given * torch.cat(within)
    return torch.zeros(len(batch), dtype=torch.float64).index_add(0, inputs.sequence_ids, given)


@pytest.mark.parametrize("loss", sorted(SLOPES))
@pytest.mark.parametrize("kl", [None, *sorted(KL_SLOPES)])
def test_second_formula_gives_the_gradient_of_autograd(loss, kl):
    more = {} if kl is None else {"kl_coef": 0.1, "kl_estimator": kl}
    plan = StepPlan(ObjectiveSettings(loss=loss, **more))
    share, log_probs = share_of(plan)
    wanted, slack, _, of_places = second_gradients(share, log_probs, plan).unbind(1)
    for by_place, one in enumerate((wanted, of_places)):
        off = (by_autograd(share, log_probs, plan, bool(by_place)) - one).abs()
        assert bool((off <= slack).all())
        assert float(slack.max()) < 0.05 * float(one.abs().max())


def test_a_policy_at_its_reference_has_the_slack_of_float32():
    """Without advantages only the KL is left, whose float32 gradient is mostly rounding there."""
    for kl in KL_SLOPES:
        plan = StepPlan(ObjectiveSettings(kl_coef=1.0, kl_estimator=kl))
        share, log_probs = share_of(plan)
        for size in (1e-6, 1e-5, 1e-4, 1e-3):
            moved = size * torch.where(torch.arange(len(log_probs)) % 3 > 0, 1.0, 0.7)
            batch = dataclasses.replace(
                share.batch, advantages=torch.zeros(len(log_probs)), ref_log_probs=log_probs + moved
            )
            at = dataclasses.replace(share, batch=batch)
            wanted, slack, *_ = second_gradients(at, log_probs, plan).unbind(1)
            off = (by_autograd(at, log_probs, plan) - wanted).abs()
            assert bool((off <= slack).all()), (kl, size)
            if size == 1e-3:  # A KL without a gradient still shows.
                assert bool((wanted.abs() > slack).any()), kl


def test_a_cut_of_the_kl_is_on_either_side():
    """Float32 may cut the KL at 10 nats where float64 does not."""
    plan = StepPlan(ObjectiveSettings(kl_coef=1.0))
    share, log_probs = share_of(plan)
    exact = torch.tensor(2.6, dtype=torch.float64)
    for _ in range(50):  # Newton's steps to exp(d) - 1 - d = 10.
        exact = exact - (torch.expm1(exact) - exact - 10) / torch.expm1(exact)
    batch = dataclasses.replace(share.batch, ref_log_probs=log_probs + exact.float())
    at = dataclasses.replace(share, batch=batch)
    wanted, slack, *_ = second_gradients(at, log_probs, plan).unbind(1)
    assert bool(((by_autograd(at, log_probs, plan) - wanted).abs() <= slack).all())


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_second_formula_corrects_the_mismatch_itself(kind):
    plan = StepPlan(correction=CorrectionConfig(kind=kind, veto_below=0.3))
    share, log_probs = share_of(plan)
    wanted, slack, *_ = second_gradients(share, log_probs, plan).unbind(1)
    assert bool(((by_autograd(share, log_probs, plan) - wanted).abs() <= slack).all())
    batch = dataclasses.replace(share.batch, policy_factors=1 - share.batch.policy_factors)
    wrong = by_autograd(dataclasses.replace(share, batch=batch), log_probs, plan)
    assert bool(((wrong - wanted).abs() > slack).any())


def test_clamped_ratios_are_slack_and_unknown_losses_have_no_second_formula():
    for loss in ("ppo_clip", "gspo"):
        plan = StepPlan(ObjectiveSettings(loss=loss))
        share, log_probs = share_of(plan, spread=15.0)
        wanted, slack, *_ = second_gradients(share, log_probs, plan).unbind(1)
        assert bool(((by_autograd(share, log_probs, plan) - wanted).abs() <= slack).all()), loss
    for loss in set(LOSSES.names()) - SLOPES.keys():
        plan = StepPlan(ObjectiveSettings(loss=loss))
        assert bool(second_gradients(share, log_probs, plan).isnan().all()), loss
