"""Policy losses: values against loops, gradients by finite differences, and their identities."""

import dataclasses

import plain_algorithms as plain
import pytest
import torch

from rlmath.algorithms.losses import LOSSES, LossInputs, get_loss, metric_means
from rlmath.algorithms.losses.clip import ClipOptions, DualClipOptions
from rlmath.algorithms.losses.dppo import Divergence
from rlmath.algorithms.settings import ObjectiveSettings

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
def test_agrees_with_loops(name, per_token, divergence):
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


# Those whose gradient flows through everything that the value depends on; the others stop it
# somewhere by intent, and are compared with what they should give below.
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "sapo", "dppo", "reinforce"])
def test_gradcheck(name):
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


def test_gspo_token_equals_gspo_for_sequence_advantages_and_weights():
    inputs = make()
    per_sequence = torch.rand(len(LENGTHS), dtype=torch.float64)[inputs.sequence_ids]
    inputs = dataclasses.replace(inputs, weights=per_sequence)
    a, b = (get_loss(name)(inputs, options_for(name)) for name in ("gspo", "gspo_token"))
    assert torch.allclose(a.loss, b.loss, rtol=1e-12)
    assert torch.allclose(gradient(a.loss, inputs), gradient(b.loss, inputs), rtol=1e-10)


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


def test_ppo_clip_by_hand():
    log_probs = torch.tensor([2.0, 2.0, 0.5, 0.5, 9.0]).log().requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(5),
        engine_log_probs=torch.zeros(5),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        weights=torch.ones(5),
        sequence_ids=torch.zeros(5, dtype=torch.int64),
    )
    got = get_loss("ppo_clip")(inputs, DualClipOptions(dual_clip=3.0))
    assert got.token_losses.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8, 3.0])
    assert gradient(got.loss, inputs).tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, 0.0])
    sums = {k: float(v) for k, v in got.metric_sums.items()}
    assert sums["token/clip_fraction_high"] == 1
    assert sums["token/clip_fraction_low"] == 1
    assert sums["token/dual_clip_fraction"] == 1


def test_dual_clip_is_a_cap_on_the_ratio_of_negative_advantages():
    """min(min(r, cap) A, clip(r) A), the two-sided clip, is the same thing."""
    inputs = make(spread=1.5)
    s = options_for("ppo_clip")
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    a = inputs.advantages
    capped = torch.where(a < 0, ratio.clamp(max=s.dual_clip), ratio)
    two_sided = -torch.minimum(capped * a, ratio.clamp(0.8, 1.28) * a) * inputs.mask
    got = get_loss("ppo_clip")(inputs, s).token_losses
    assert torch.allclose(got, two_sided, rtol=1e-12)


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


def test_an_unknown_loss_is_answered_with_the_known():
    with pytest.raises(ValueError, match=r"loss = 'ppo'.*cispo.*ppo_clip"):
        get_loss("ppo")


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


def test_an_objective_takes_the_options_of_its_loss_alone():
    with pytest.raises(ValueError, match=r"loss 'sapo' takes SapoOptions, not DualClipOptions"):
        ObjectiveSettings(loss="sapo", options=DualClipOptions(dual_clip=3.0))
    with pytest.raises(ValueError, match="kl_coef"):
        ObjectiveSettings(kl_coef=-1.0)
    assert ObjectiveSettings(loss="cispo").loss_options == ClipOptions()
