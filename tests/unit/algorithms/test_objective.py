import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses import make, options_for

from rlmath.algorithms.aggregation import AGGREGATIONS, sequence_weights
from rlmath.algorithms.early_stop import decide
from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.losses import LOSSES, get_loss, metric_means
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching import assign

LENGTHS = [3, 1, 7, 2, 5, 4, 1, 6]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
TOKEN_FIELDS = (
    "log_probs",
    "old_log_probs",
    "engine_log_probs",
    "advantages",
    "mask",
    "weights",
    "ref_log_probs",
    "entropy",
)


def take(inputs, sequences):
    """The cut of these sequences, in this order, numbered from 0."""
    rows = torch.cat([(inputs.sequence_ids == s).nonzero().flatten() for s in sequences])
    ids = torch.cat(
        [torch.full((LENGTHS[s],), i, dtype=torch.int64) for i, s in enumerate(sequences)]
    )
    fields = {name: getattr(inputs, name)[rows] for name in TOKEN_FIELDS}
    return dataclasses.replace(inputs, sequence_ids=ids, **fields)


def batch(aggregation="token_mean", seed=0):
    inputs = make(seed=seed, lengths=LENGTHS)
    counts = torch.zeros(len(LENGTHS)).index_add(0, inputs.sequence_ids, inputs.mask.float())
    weights = sequence_weights(aggregation, counts, torch.tensor(GROUPS), 8)
    return dataclasses.replace(inputs, weights=weights[inputs.sequence_ids] * inputs.mask)


def totals(outputs):
    keys = outputs[0].metric_sums.keys()
    return {key: sum(float(o.metric_sums[key]) for o in outputs) for key in keys}


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
@pytest.mark.parametrize("name", LOSSES.names())
# Each has forty combinations.
@settings(max_examples=settings().max_examples // 5)
@given(data=st.data())
def test_no_cut_changes_loss_gradient_or_metrics(name, aggregation, data):
    """Any number of ranks and any micro-batch size, through the very functions that cut."""
    s = ObjectiveSettings(
        loss=name,
        options=options_for(name),
        kl_coef=0.1,
        entropy_coef=0.01,
        off_policy_mask_kl=0.05,
    )
    inputs = batch(aggregation, seed=data.draw(st.integers(0, 9)))
    whole = policy_objective(inputs, s)
    want = torch.autograd.grad(whole.loss, [inputs.log_probs, inputs.entropy])

    ranks = assign(LENGTHS, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30)))
    cuts = [take(inputs, m.sequences) for rank in ranks for m in rank if m.sequences]
    outputs = [policy_objective(cut, s) for cut in cuts]
    loss = sum(o.loss for o in outputs)
    got = torch.autograd.grad(loss, [inputs.log_probs, inputs.entropy])

    assert torch.allclose(loss, whole.loss, rtol=1e-12, atol=1e-14)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert totals(outputs) == pytest.approx(totals([whole]), rel=1e-10, abs=1e-12)
    for key, value in whole.metric_maxima.items():
        assert max(float(o.metric_maxima[key]) for o in outputs) == float(value)


def test_float32_stays_within_the_relative_error_that_layouts_may_have():
    inputs = batch()
    single = {
        name: getattr(inputs, name).detach().float() for name in TOKEN_FIELDS if name != "mask"
    }
    cast = dataclasses.replace(inputs, **single)
    want = policy_objective(inputs, ObjectiveSettings()).loss
    got = policy_objective(cast, ObjectiveSettings()).loss
    assert float(got) == pytest.approx(float(want.detach()), rel=1e-5)
    assert got.dtype == torch.float32


def test_objective_terms_add_up():
    inputs = batch()
    s = ObjectiveSettings(kl_coef=0.3, entropy_coef=0.02, kl_estimator="k2")
    kl = kl_estimate("k2", inputs.log_probs, inputs.ref_log_probs, inputs.old_log_probs)
    want = (
        get_loss("ppo_clip")(inputs, s.loss_options).loss
        + 0.3 * (inputs.weights * kl).sum()
        - 0.02 * (inputs.weights * inputs.entropy).sum()
    )
    got = policy_objective(inputs, s)
    assert torch.allclose(got.loss, want, rtol=1e-12)
    weighted = (inputs.weights * got.token_losses).sum()
    assert torch.allclose(got.loss, weighted, rtol=1e-12)


def test_factors_multiply_the_policy_term_alone():
    """A correction, and the top-entropy tokens: neither denominators nor other terms see them."""
    inputs = batch()
    g = torch.Generator().manual_seed(1)
    factors = torch.rand(inputs.mask.numel(), dtype=torch.float64, generator=g)
    factors[::3] = 0.0
    s = ObjectiveSettings(kl_coef=0.3, entropy_coef=0.02, kl_estimator="k2")
    plain = policy_objective(inputs, s)
    got = policy_objective(dataclasses.replace(inputs, policy_factors=factors), s)
    policy = policy_objective(inputs, ObjectiveSettings())
    want = (inputs.weights * factors * policy.token_losses).sum()
    other_terms = plain.loss - policy.loss
    assert torch.allclose(got.loss, want + other_terms, rtol=1e-12)
    for key in ("weighted/kl_loss", "token/kl", "token/entropy", "count/token"):
        assert float(got.metric_sums[key]) == float(plain.metric_sums[key]), key
    of_entropy = [
        torch.autograd.grad(o.loss, inputs.entropy, retain_graph=True)[0] for o in (got, plain)
    ]
    assert torch.equal(*of_entropy) and of_entropy[0].any()
    # Without other terms, a token of factor 0 has no gradient, and one of factor 1/2 half of it.
    factors = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64).repeat(20)[: inputs.mask.numel()]
    halved = policy_objective(
        dataclasses.replace(inputs, policy_factors=factors), ObjectiveSettings()
    )
    gradient, whole = (
        torch.autograd.grad(o.loss, inputs.log_probs, retain_graph=True)[0]
        for o in (halved, policy)
    )
    assert torch.allclose(gradient, factors * whole, rtol=1e-12, atol=0)


def test_zero_policy_factors_keep_only_the_kl():
    inputs = batch()
    none = dataclasses.replace(inputs, policy_factors=torch.zeros_like(inputs.weights))
    got = policy_objective(none, ObjectiveSettings())
    assert decide(totals([got]), 5.0).kind == "no_signal"
    with_kl = policy_objective(none, ObjectiveSettings(kl_coef=0.1))
    assert decide(totals([with_kl]), 5.0).kind == "keep"
    assert torch.autograd.grad(with_kl.loss, inputs.log_probs)[0].any()


def test_terms_that_are_off_leave_no_gradient_but_are_measured():
    inputs = batch()
    got = policy_objective(inputs, ObjectiveSettings())
    assert torch.autograd.grad(got.loss, inputs.entropy, allow_unused=True) == (None,)
    detached = {name: getattr(inputs, name).detach() for name in TOKEN_FIELDS}
    inputs = dataclasses.replace(inputs, **detached)
    means = metric_means(totals([got]))
    rows = inputs.mask
    assert means["entropy"] == pytest.approx(float(inputs.entropy[rows].mean()))
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()[rows]
    assert means["importance_ratio"] == pytest.approx(float(ratio.mean()))
    assert float(got.metric_maxima["importance_ratio_max"]) == pytest.approx(float(ratio.max()))
    assert means["kl"] == pytest.approx(
        float(
            kl_estimate("k3", inputs.log_probs, inputs.ref_log_probs, inputs.old_log_probs)[
                rows
            ].mean()
        )
    )


def test_at_the_first_minibatch_ratio_is_one_and_kl_zero():
    inputs = batch()
    same = dataclasses.replace(
        inputs, old_log_probs=inputs.log_probs.detach(), ref_log_probs=inputs.log_probs.detach()
    )
    means = metric_means(totals([policy_objective(same, ObjectiveSettings(kl_coef=0.1))]))
    assert means["importance_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert means["kl"] == 0.0
    assert means["approx_kl"] == 0.0
    assert means["clip_fraction_low"] == means["clip_fraction_high"] == 0.0


def test_equal_rewards_give_no_gradient_and_say_so():
    inputs = batch()
    flat = dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    got = policy_objective(flat, ObjectiveSettings())
    assert not torch.autograd.grad(got.loss, inputs.log_probs)[0].any()
    assert decide(totals([got]), 5.0).kind == "no_signal"
    with_kl = policy_objective(flat, ObjectiveSettings(kl_coef=0.1))
    assert decide(totals([with_kl]), 5.0).kind == "keep"


def test_one_value_that_is_not_finite_is_counted_and_stops_the_minibatch():
    inputs = batch()
    at = int(inputs.mask.nonzero()[0])
    for field in ("log_probs", "old_log_probs", "ref_log_probs", "entropy"):
        broken = getattr(inputs, field).detach().clone()
        broken[at] = float("nan")
        got = policy_objective(dataclasses.replace(inputs, **{field: broken}), ObjectiveSettings())
        assert float(got.metric_sums["count/nonfinite"]) == 1, field
        assert decide(totals([got]), None).kind == "early_stop", field


def test_objective_names_missing_inputs():
    inputs = dataclasses.replace(batch(), ref_log_probs=None, entropy=None)
    policy_objective(inputs, ObjectiveSettings())
    with pytest.raises(ValueError, match=r"kl_coef = 0.1 needs ref_log_probs"):
        policy_objective(inputs, ObjectiveSettings(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef = 0.1 needs entropy"):
        policy_objective(inputs, ObjectiveSettings(entropy_coef=0.1))


def test_off_policy_mask_leaves_out_negative_sequences_that_the_policy_has_left():
    inputs = batch()
    ids, engine = inputs.sequence_ids, inputs.log_probs.detach().clone()
    engine[(ids == 0) | (ids == 2)] += 1.0  # the engine liked sequences 0 and 2 far better
    advantages = torch.where(ids == 2, 1.0, -1.0).double()
    inputs = dataclasses.replace(inputs, engine_log_probs=engine, advantages=advantages)
    s = ObjectiveSettings(off_policy_mask_kl=0.5)
    got = policy_objective(inputs, s)
    gradient = torch.autograd.grad(got.loss, inputs.log_probs, retain_graph=True)[0]
    plain = torch.autograd.grad(
        policy_objective(inputs, ObjectiveSettings()).loss, inputs.log_probs
    )[0]
    assert not gradient[ids == 0].any()
    assert torch.equal(gradient[ids != 0], plain[ids != 0])
    masked = float(got.metric_sums["token/off_policy_masked"])
    assert masked == int((inputs.mask & (ids == 0)).sum())
    assert torch.equal(got.off_policy_masked, inputs.mask & (ids == 0))
    assert policy_objective(inputs, ObjectiveSettings()).off_policy_masked is None


def test_a_minibatch_that_is_masked_off_policy_altogether_has_no_signal():
    inputs = batch()
    inputs = dataclasses.replace(
        inputs,
        engine_log_probs=inputs.log_probs.detach() + 1.0,
        advantages=-torch.ones_like(inputs.advantages),
    )
    got = policy_objective(inputs, ObjectiveSettings(off_policy_mask_kl=0.5))
    assert decide(totals([got]), 5.0).kind == "no_signal"
