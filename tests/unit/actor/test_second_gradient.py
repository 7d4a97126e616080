"""The second formula of each sequence's gradient, against autograd of the objective."""

import dataclasses

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.second_gradient import KL_SLOPES, SLOPES, second_gradients
from rlmath.algorithms.correction import CorrectionConfig, correct
from rlmath.algorithms.losses import LOSSES, LossInputs
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share
from tests.support.actors import make_batch

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
            *(old, batch.engine_log_probs, batch.loss_mask, batch.response_lengths),
            plan.correction,
        )
        batch = dataclasses.replace(batch, policy_factors=found.weights.float())
    weights = torch.rand(count, generator=draw)
    return Share(batch, [], weights, torch.arange(len(batch))), log_probs


def by_autograd(share, log_probs, plan):
    batch, own = share.batch, log_probs.clone().requires_grad_()
    ids = torch.repeat_interleave(torch.arange(len(batch)), batch.response_lengths)
    inputs = LossInputs(
        log_probs=own,
        old_log_probs=batch.old_log_probs,
        engine_log_probs=batch.engine_log_probs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        weights=share.weights,
        sequence_ids=ids,
        ref_log_probs=batch.ref_log_probs,
        policy_factors=batch.policy_factors,
    )
    policy_objective(inputs, plan.objective).loss.backward()
    return torch.zeros(len(batch)).index_add(0, ids, own.grad).double()


@pytest.mark.parametrize("loss", sorted(SLOPES))
@pytest.mark.parametrize("kl", [None, *sorted(KL_SLOPES)])
def test_second_formula_gives_the_gradient_of_autograd(loss, kl):
    more = {} if kl is None else {"kl_coef": 0.1, "kl_estimator": kl}
    plan = StepPlan(ObjectiveSettings(loss=loss, **more))
    share, log_probs = share_of(plan)
    wanted, slack, _ = second_gradients(share, log_probs, plan).unbind(1)
    off = (by_autograd(share, log_probs, plan) - wanted).abs()
    assert bool((off <= slack).all())
    assert float(slack.max()) < 0.05 * float(wanted.abs().max())


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_second_formula_corrects_the_mismatch_itself(kind):
    plan = StepPlan(correction=CorrectionConfig(kind=kind, veto_below=0.3))
    share, log_probs = share_of(plan)
    wanted, slack, _ = second_gradients(share, log_probs, plan).unbind(1)
    assert bool(((by_autograd(share, log_probs, plan) - wanted).abs() <= slack).all())
    batch = dataclasses.replace(share.batch, policy_factors=1 - share.batch.policy_factors)
    wrong = by_autograd(dataclasses.replace(share, batch=batch), log_probs, plan)
    assert bool(((wrong - wanted).abs() > slack).any())


def test_clamped_ratios_are_slack_and_unknown_losses_have_no_second_formula():
    for loss in ("ppo_clip", "gspo"):
        plan = StepPlan(ObjectiveSettings(loss=loss))
        share, log_probs = share_of(plan, spread=15.0)
        wanted, slack, _ = second_gradients(share, log_probs, plan).unbind(1)
        assert bool(((by_autograd(share, log_probs, plan) - wanted).abs() <= slack).all()), loss
    for loss in set(LOSSES.names()) - SLOPES.keys():
        plan = StepPlan(ObjectiveSettings(loss=loss))
        assert bool(second_gradients(share, log_probs, plan).isnan().all()), loss
