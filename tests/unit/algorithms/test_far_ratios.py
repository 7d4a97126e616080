"""Tokens whose probability moved by many orders of magnitude: no overflow, and they are named."""

import dataclasses
import itertools
import math

import pytest
import torch

from rlmath.actor.farthest import Farthest, say_clamped
from rlmath.algorithms.early_stop import decide
from rlmath.algorithms.kl import KL_ESTIMATORS, kl_estimate
from rlmath.algorithms.losses import LOSSES, LossInputs
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share
from rlmath.types import TrainingBatch

WITH_DUAL_CLIP = [
    name
    for name in LOSSES.names()
    if "dual_clip" in {field.name for field in dataclasses.fields(LOSSES.options(name))}
]
FAR = [25.0, 88.0, 89.0, 720.0, 1e4]
CASES = [
    (loss, dual)
    for loss in LOSSES.names()
    for dual in (None, 3.0)
    if dual is None or loss in WITH_DUAL_CLIP
]
assert len(WITH_DUAL_CLIP) == 5


def make(log_ratio, advantage, **changes):
    """Two sequences of three tokens in float32; the second token of the first is far away."""
    old = torch.full((6,), -1.5)
    log_probs = old + torch.tensor([0.1, 0.0, -0.1, 0.05, 0.0, -0.05])
    log_probs[1] = old[1] + log_ratio
    fields = {
        "log_probs": log_probs.requires_grad_(),
        "old_log_probs": old,
        "engine_log_probs": old,
        "advantages": torch.full((6,), advantage),
        "mask": torch.ones(6, dtype=torch.bool),
        "weights": torch.full((6,), 1 / 6),
        "sequence_ids": torch.tensor([0, 0, 0, 1, 1, 1]),
        "ref_log_probs": old,
    }
    return LossInputs(**(fields | changes))


def of(loss, dual, **others):
    options = LOSSES.options(loss)
    return ObjectiveSettings(
        loss=loss, options=options() if dual is None else options(dual_clip=dual), **others
    )


@pytest.mark.parametrize("loss, dual", CASES)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS.names())
def test_losses_and_gradients_stay_finite_and_the_tokens_are_counted(loss, dual, estimator):
    settings = of(loss, dual, kl_coef=0.1, kl_estimator=estimator)
    for size, sign, advantage in itertools.product(FAR, (1, -1), (1.0, -1.0)):
        inputs = make(sign * size, advantage)
        got = policy_objective(inputs, settings)
        (gradient,) = torch.autograd.grad(got.loss, inputs.log_probs)
        case = (sign * size, advantage)
        assert got.loss.isfinite() and gradient.isfinite().all(), case
        assert gradient.any(), case
        assert float(got.metric_sums["count/nonfinite"]) == 0, case
        assert float(got.metric_sums["count/log_ratio_clamped"]) == 1, case
        assert got.farthest.tolist() == pytest.approx([1.0, sign * size]), case


# The gradient of the others is that of the log-prob itself, which is bounded.
THROUGH_THE_RATIO = ("ppo_clip", "gspo", "gmpo", "sapo", "dppo")


@pytest.mark.parametrize("loss, dual", [case for case in CASES if case[0] in THROUGH_THE_RATIO])
def test_beyond_the_limit_a_ratio_has_no_gradient(loss, dual):
    """Of gspo and gmpo, the token's share of its sequence's ratio."""
    settings = of(loss, dual)
    for size, sign, advantage in itertools.product(FAR, (1, -1), (1.0, -1.0)):
        inputs = make(sign * size, advantage)
        got = policy_objective(inputs, settings)
        (gradient,) = torch.autograd.grad(got.loss, inputs.log_probs)
        assert float(gradient[1]) == 0.0, (sign * size, advantage)


def test_a_token_that_is_not_a_number_does_not_hide_the_farthest():
    nan = float("nan")
    got = policy_objective(
        make(0.0, 1.0, log_probs=torch.tensor([nan, -1.5, 60.0, -1.5, -90.0, -1.5])),
        ObjectiveSettings(),
    )
    assert got.farthest.tolist() == [4.0, -88.5]
    assert float(got.metric_sums["count/log_ratio_clamped"]) == 2
    alone = make(0.0, 1.0, log_probs=torch.tensor([nan, *[-1.5] * 5]))
    assert policy_objective(alone, ObjectiveSettings()).farthest.tolist() == [0.0, 0.0]


def test_within_the_limit_nothing_changes():
    inputs = make(19.0, -1.0)
    got = policy_objective(inputs, ObjectiveSettings())
    (gradient,) = torch.autograd.grad(got.loss, inputs.log_probs)
    assert float(gradient[1]) == pytest.approx(math.exp(19.0) / 6, rel=1e-5)
    assert float(got.metric_sums["count/log_ratio_clamped"]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES.names())
def test_what_is_not_finite_is_still_seen(loss, value):
    """The clamp would make a number of an infinite log-prob."""
    got = policy_objective(make(value, -1.0), ObjectiveSettings(loss=loss))
    # Of gspo and gmpo, the whole sequence may be spoiled.
    assert float(got.metric_sums["count/nonfinite"]) >= 1
    assert decide({k: float(v) for k, v in got.metric_sums.items()}, None).kind == "early_stop"


@pytest.mark.parametrize("loss", [name for name in WITH_DUAL_CLIP if name != "ppo_clip"])
def test_dual_clip_bounds_what_is_pushed_down(loss):
    """A whole sequence at 12 times its old probability, with a negative advantage."""
    changes = {"log_probs": torch.full((6,), -1.5 + math.log(12)).requires_grad_()}
    bounded = policy_objective(make(0.0, -2.0, **changes), of(loss, 3.0))
    free = policy_objective(make(0.0, -2.0, **changes), ObjectiveSettings(loss=loss))
    assert float(free.loss.detach()) == pytest.approx(24.0, rel=1e-5)
    assert float(bounded.loss.detach()) == pytest.approx(6.0, rel=1e-5)
    assert not torch.autograd.grad(bounded.loss, changes["log_probs"])[0].any()
    assert float(bounded.metric_sums["token/dual_clip_fraction"]) == 6


@pytest.mark.parametrize("name", ["k3", "k3_unbiased"])
def test_k3_is_at_most_10_and_has_no_gradient_beyond(name):
    for difference, want in ((2.0, math.exp(2) - 3), (-3.0, math.exp(-3) + 2), (50.0, 10.0)):
        log_probs = torch.tensor([-60.0], requires_grad=True)
        got = kl_estimate(name, log_probs, log_probs.detach() + difference, log_probs.detach())
        assert float(got.detach()) == pytest.approx(want, rel=1e-5)
    for difference in (-1e4, 1e4, -25.0, 25.0):
        log_probs = torch.tensor([-60.0], requires_grad=True)
        got = kl_estimate("k3", log_probs, log_probs.detach() + difference, log_probs.detach())
        assert float(got.detach()) <= 10.0
        assert float(torch.autograd.grad(got, log_probs)[0]) == 0.0


def test_the_farthest_token_of_all_micro_batches_is_named():
    responses, prompts = torch.tensor([6, 4, 2]), torch.tensor([2, 3, 1])
    total = int((responses + prompts).sum())
    batch = TrainingBatch(
        tokens=torch.arange(100, 100 + total),
        prompt_lengths=prompts,
        response_lengths=responses,
        group_ids=torch.zeros(3, dtype=torch.int64),
        weights_versions=torch.zeros(3, dtype=torch.int64),
        rewards=torch.zeros(3),
        engine_log_probs=torch.zeros(12),
        advantages=torch.zeros(12),
        loss_mask=torch.ones(12, dtype=torch.bool),
    )
    # A rank has these three of a step's sequences.
    share = Share(batch, [], torch.zeros(12), places=torch.tensor([5, 9, 2]))
    output = policy_objective(make(-30.0, 1.0), ObjectiveSettings())
    other = policy_objective(make(40.0, 1.0), ObjectiveSettings())
    found = [
        Farthest.of(output, torch.tensor([0, 1, 2, 3, 4, 5]), share),
        Farthest.of(other, torch.tensor([6, 7, 8, 9, 10, 11]), share),
        Farthest.of(
            dataclasses.replace(output, farthest=None), torch.tensor([], dtype=torch.int64), share
        ),
    ]
    farthest = max(found, key=abs)
    # The second sequence begins at token 8, its response at 11; row 7 is the second of it.
    assert dataclasses.astuple(farthest) == (9.0, 1.0, 112.0, pytest.approx(40.0))
    said = say_clamped({"log_ratio_clamped_count": 2.0, "token_count": 12.0}, farthest)
    assert "2 of 12 tokens" in said
    assert "response token 1 of sequence 9 of the batch (token id 112)" in said
    assert "log-ratio 40" in said
