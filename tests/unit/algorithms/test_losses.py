import dataclasses
import itertools
import math

import plain_algorithms as plain
import pytest
import torch

from rlmath.actor.farthest import Farthest, say_clamped
from rlmath.algorithms.early_stop import decide
from rlmath.algorithms.kl import KL_ESTIMATORS, kl_estimate
from rlmath.algorithms.losses import LOSSES, LossInputs, get_loss, metric_means
from rlmath.algorithms.losses.clip import ClipOptions
from rlmath.algorithms.losses.dppo import Divergence
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share
from tests.support.batches import batch_of_lengths

NAMES = LOSSES.names()
LENGTHS = [5, 1, 4, 7]


def make(seed=0, spread=0.5, lengths=LENGTHS, masked=True, per_token=False):
    g = torch.Generator().manual_seed(seed)
    r = sum(lengths)
    ids = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    old = -3.0 * torch.rand(r, dtype=torch.float64, generator=g) - 0.05
    shift = spread * torch.randn(r, dtype=torch.float64, generator=g)
    mask = torch.rand(r, generator=g) > 0.2 if masked else torch.ones(r, dtype=torch.bool)
    advantages = torch.randn(r if per_token else len(lengths), dtype=torch.float64, generator=g)
    return LossInputs(
        log_probs=(old + shift).clamp(max=-0.01).requires_grad_(),
        old_log_probs=old,
        engine_log_probs=old + 0.01 * shift,
        advantages=advantages if per_token else advantages[ids],
        mask=mask,
        weights=torch.rand(r, dtype=torch.float64, generator=g),
        sequence_ids=ids,
        ref_log_probs=old - 0.1,
        entropy=torch.rand(r, dtype=torch.float64, generator=g).requires_grad_(),
    )


def options_for(name, **changes):
    """Wide of the bounds on both sides, for both signs."""
    kind = LOSSES.options(name)
    known = {field.name for field in dataclasses.fields(kind)}
    wanted = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5} | changes
    return kind(**{key: value for key, value in wanted.items() if key in known})


def gradient(loss, inputs):
    return torch.autograd.grad(loss, inputs.log_probs)[0]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_losses_agree_with_loops(name, per_token, divergence):
    s = options_for(name, divergence=Divergence[divergence])
    inputs = make(per_token=per_token)
    want = plain.policy_losses(
        name,
        inputs.log_probs.tolist(),
        inputs.old_log_probs.tolist(),
        inputs.advantages.tolist(),
        inputs.mask.tolist(),
        inputs.sequence_ids.tolist(),
        s,
    )
    got = get_loss(name)(inputs, s)
    assert got.token_losses.tolist() == pytest.approx(want, rel=1e-10, abs=1e-12)
    total = sum(w * x for w, x in zip(inputs.weights.tolist(), want, strict=True))
    assert float(got.loss.detach()) == pytest.approx(total, rel=1e-10)


# Losses whose gradient flows through everything that the value depends on; the others stop it
# somewhere by intent, and are compared with what they should give below.
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "sapo", "dppo", "reinforce"])
def test_losses_pass_gradcheck(name):
    inputs = make(seed=3)

    def loss(log_probs):
        return get_loss(name)(
            dataclasses.replace(inputs, log_probs=log_probs), options_for(name)
        ).loss

    assert torch.autograd.gradcheck(loss, inputs.log_probs)


def test_cispo_gradient_is_the_weighted_policy_gradient():
    inputs = make()
    got = gradient(get_loss("cispo")(inputs, options_for("cispo")).loss, inputs)
    ratio = (inputs.log_probs - inputs.old_log_probs).detach().exp().clamp(0.8, 1.28)
    want = -inputs.weights * ratio * inputs.advantages * inputs.mask
    assert torch.allclose(got, want, rtol=1e-12, atol=0)


def test_gspo_token_gradient_stays_with_its_token():
    inputs = make(per_token=True, masked=False, spread=0.0)
    got = gradient(get_loss("gspo_token")(inputs, options_for("gspo_token")).loss, inputs)
    assert torch.allclose(got, -inputs.weights * inputs.advantages, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    """At ratio 1: -w A. (For gspo and gmpo the sequence shares it out, so weights are equal.)"""
    inputs = make(spread=0.0)
    inputs = dataclasses.replace(
        inputs,
        log_probs=inputs.old_log_probs.clone().requires_grad_(),
        weights=torch.full_like(inputs.weights, 0.3),
    )
    got = gradient(get_loss(name)(inputs, options_for(name)).loss, inputs)
    assert torch.allclose(got, -0.3 * inputs.advantages * inputs.mask, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_values_at_masked_tokens_are_never_read(name):
    inputs = make()
    clean = get_loss(name)(inputs, options_for(name))
    hole = ~inputs.mask
    poison = {
        field: torch.where(hole, float("nan"), getattr(inputs, field).detach())
        for field in ("log_probs", "old_log_probs", "engine_log_probs", "advantages", "weights")
    }
    poison["log_probs"] = poison["log_probs"].requires_grad_()
    poisoned = dataclasses.replace(inputs, **poison)
    got = get_loss(name)(poisoned, options_for(name))
    assert torch.equal(got.loss, clean.loss)
    assert torch.equal(gradient(got.loss, poisoned), gradient(clean.loss, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_without_tokens_gives_zero_and_the_same_metrics(name):
    empty = make(lengths=[])
    got = get_loss(name)(empty, options_for(name))
    assert float(got.loss.detach()) == 0.0
    assert set(got.metric_sums) == set(get_loss(name)(make(), options_for(name)).metric_sums)
    got.loss.backward()


def test_metric_means_divide_by_what_the_name_says():
    means = metric_means({"weighted/loss": 0.5, "token/ratio": 6.0, "count/token": 3.0})
    assert means == {"loss": 0.5, "ratio": 2.0, "token_count": 3.0}
    assert metric_means({"token/ratio": 0.0, "count/token": 0.0})["ratio"] == 0.0
    with pytest.raises(ValueError, match="'ratio'"):
        metric_means({"ratio": 1.0})


@pytest.mark.parametrize(
    "loss, wrong, match",
    [
        ("ppo_clip", {"clip_low": 1.5}, "clip_low = 1.5"),
        ("ppo_clip", {"clip_high": -0.1}, "clip_high = -0.1"),
        ("ppo_clip", {"dual_clip": 1.1}, r"dual_clip = 1.1.*1.2"),
        ("gspo", {"dual_clip": 1.1}, r"dual_clip = 1.1.*1.2"),
        ("dppo", {"dual_clip": 1.0}, "dual_clip = 1.0"),
        ("dppo", {"threshold": 0.0}, "threshold = 0.0"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive = 0.0"),
    ],
)
def test_options_that_cannot_work_are_refused(loss, wrong, match):
    with pytest.raises(ValueError, match=match):
        LOSSES.options(loss)(**wrong)


def test_an_objective_has_the_default_options_of_its_loss():
    assert ObjectiveSettings(loss="cispo").loss_options == ClipOptions()


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


def far_inputs(log_ratio, advantage, **changes):
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
        inputs = far_inputs(sign * size, advantage)
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
    """In gspo and gmpo, the token's share of its sequence's ratio."""
    settings = of(loss, dual)
    for size, sign, advantage in itertools.product(FAR, (1, -1), (1.0, -1.0)):
        inputs = far_inputs(sign * size, advantage)
        got = policy_objective(inputs, settings)
        (gradient,) = torch.autograd.grad(got.loss, inputs.log_probs)
        assert float(gradient[1]) == 0.0, (sign * size, advantage)


def test_a_token_that_is_not_a_number_does_not_hide_the_farthest():
    nan = float("nan")
    got = policy_objective(
        far_inputs(0.0, 1.0, log_probs=torch.tensor([nan, -1.5, 60.0, -1.5, -90.0, -1.5])),
        ObjectiveSettings(),
    )
    assert got.farthest.tolist() == [4.0, -88.5]
    assert float(got.metric_sums["count/log_ratio_clamped"]) == 2
    alone = far_inputs(0.0, 1.0, log_probs=torch.tensor([nan, *[-1.5] * 5]))
    assert policy_objective(alone, ObjectiveSettings()).farthest.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES.names())
def test_nonfinite_log_probs_stop_the_step(loss, value):
    """The clamp would make a finite number of an infinite log-prob."""
    got = policy_objective(far_inputs(value, -1.0), ObjectiveSettings(loss=loss))
    # In gspo and gmpo, the whole sequence may be spoiled.
    assert float(got.metric_sums["count/nonfinite"]) >= 1
    assert decide({k: float(v) for k, v in got.metric_sums.items()}, None).kind == "early_stop"


@pytest.mark.parametrize("loss", [name for name in WITH_DUAL_CLIP if name != "ppo_clip"])
def test_dual_clip_bounds_what_is_pushed_down(loss):
    """A whole sequence at 12 times its old probability, with a negative advantage."""
    changes = {"log_probs": torch.full((6,), -1.5 + math.log(12)).requires_grad_()}
    bounded = policy_objective(far_inputs(0.0, -2.0, **changes), of(loss, 3.0))
    free = policy_objective(far_inputs(0.0, -2.0, **changes), ObjectiveSettings(loss=loss))
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
    tokens = torch.arange(100, 118)
    batch = batch_of_lengths([2, 3, 1], [6, 4, 2], tokens=tokens, advantages=torch.zeros(12))
    # A rank has these three of a step's sequences.
    share = Share(batch, [], torch.zeros(12), places=torch.tensor([5, 9, 2]))
    output = policy_objective(far_inputs(-30.0, 1.0), ObjectiveSettings())
    other = policy_objective(far_inputs(40.0, 1.0), ObjectiveSettings())
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
