import dataclasses
import weakref

import pytest
import torch

from rlmath.actor.sequence_report import GRADIENT, SequenceReport, sums_of_sequences
from rlmath.algorithms.losses import LOSSES, LossInputs
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.training.checks.sequences import (
    Expected,
    wrong_advantages,
    wrong_gradients,
    wrong_places,
    wrong_tokens,
)

LENGTHS = (5, 9, 30, 3)
ADVANTAGES = torch.tensor([0.7, -0.7, 1.2, -0.4])
PLACES = torch.tensor([2, 0, 3, 1])


def make_report(advantages, loss="ppo_clip", noise=0.0):
    """Report of one micro-batch after its backward pass; ``advantages`` ``[R]`` by place."""
    lengths = torch.tensor(LENGTHS)[PLACES]
    tokens = int(lengths.sum())
    draw = torch.Generator().manual_seed(1)
    log_probs = (-3 * torch.rand(tokens, generator=draw)).requires_grad_()
    ids = torch.repeat_interleave(torch.arange(4), lengths)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() + noise * torch.randn(tokens, generator=draw),
        engine_log_probs=log_probs.detach(),
        advantages=advantages,
        mask=ids != 3,
        weights=(0.3 + ids.float())[:] / tokens,
        sequence_ids=ids,
        num_sequences=4,
        policy_factors=torch.linspace(0.5, 1.0, 4)[ids],
    )
    sums = sums_of_sequences(inputs, 4)
    assert sums[:, GRADIENT].isnan().all()
    policy_objective(inputs, ObjectiveSettings(loss=loss)).loss.backward()
    second = torch.full((4, 3), torch.nan)
    return SequenceReport(torch.zeros(4), PLACES, torch.arange(4)[PLACES] * 7, sums, second)


def test_the_report_of_a_micro_batch_keeps_none_of_its_graph():
    """A cycle through a hook is not Python's, so no garbage collection would free it."""
    received = torch.zeros(6, requires_grad=True)
    log_probs, ids = received * 2, torch.tensor([0, 0, 0, 1, 1, 1])
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        engine_log_probs=log_probs.detach(),
        advantages=torch.ones(6),
        mask=ids == ids,
        weights=torch.ones(6) / 6,
        sequence_ids=ids,
        num_sequences=2,
    )
    sums = sums_of_sequences(inputs, 2)
    log_probs.sum().backward()
    assert sums[:, GRADIENT].tolist() == [3.0, 3.0]
    kept = weakref.ref(received)
    del received, log_probs, inputs
    assert kept() is None


def by_token(values):
    return torch.repeat_interleave(values[PLACES], torch.tensor(LENGTHS)[PLACES])


def expectation():
    counts = torch.tensor(LENGTHS).double()
    counts[1] = 0  # At place 3 of the report, which is masked.
    return Expected(list("abcd"), [0, 0, 1, 1], torch.arange(4) * 7, counts, ADVANTAGES.double())


@pytest.mark.parametrize("loss", LOSSES.names())
def test_gradient_of_each_loss_at_ratio_one_is_that_of_the_advantages(loss):
    report = make_report(by_token(ADVANTAGES), loss)
    assert wrong_gradients(report, 0.0, alone=True) == []
    report = make_report(by_token(ADVANTAGES), loss, noise=0.01)
    assert wrong_gradients(report, 0.01, alone=True) == []
    turned = dataclasses.replace(report, sums=report.sums * torch.tensor([1, -1, 1, 1, 1, 1, 1, 1]))
    assert "of 3 of 4 sequences" in wrong_gradients(turned, 0.01, alone=True)[0]


def test_healthy_report_breaks_nothing():
    report = make_report(by_token(ADVANTAGES))
    assert wrong_places(report, list("abcd"), complete=True) == []
    assert wrong_tokens(report, expectation()) == []
    assert wrong_advantages(report, expectation()) == []


@pytest.mark.parametrize(
    ("advantages", "cause"),
    [
        (-by_token(ADVANTAGES), "All have the opposite sign"),
        (by_token(ADVANTAGES.roll(1)), "out of order|sequence before it"),
        (by_token(ADVANTAGES).roll(7), "out of order"),
    ],
)
def test_advantages_of_another_sign_or_order_are_named(advantages, cause):
    (sentence,) = wrong_advantages(make_report(advantages), expectation())
    assert any(one in sentence for one in cause.split("|"))


def test_sequences_of_another_rank_are_named():
    report = make_report(by_token(ADVANTAGES))
    twice = dataclasses.replace(report, places=torch.tensor([2, 0, 0, 2]))
    (sentence,) = wrong_places(twice, list("abcd"), complete=True)
    assert "(a, c)" in sentence and "(b, d)" in sentence
    early = dataclasses.replace(report, places=torch.tensor([2, 0]))
    assert wrong_places(early, list("abcd"), complete=False) == []


def test_wrong_tokens_are_named():
    report = make_report(by_token(ADVANTAGES))
    other = dataclasses.replace(report, tokens=report.tokens + torch.tensor([0, 1, 0, 0]))
    (sentence,) = wrong_tokens(other, expectation())
    assert "1 of 4" in sentence and "(a)" in sentence


def test_micro_batch_without_a_gradient_is_named():
    report = make_report(by_token(ADVANTAGES))
    sums = report.sums.clone()
    sums[:2, GRADIENT] = torch.nan
    none = dataclasses.replace(report, sums=sums)
    assert "no backward pass reached 2 of 4" in wrong_gradients(none, 0.0, alone=False)[0]
    sums[:2, GRADIENT] = 0.0
    assert "gradient of exactly 0" in wrong_gradients(none, 0.0, alone=False)[0]
