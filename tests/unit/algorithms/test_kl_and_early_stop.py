import math

import plain_algorithms as plain
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms.aggregation import AGGREGATIONS, denominator, sequence_weights
from rlmath.algorithms.early_stop import decide
from rlmath.algorithms.kl import KL_ESTIMATORS, kl_estimate
from rlmath.algorithms.kl_control import next_kl_coef
from rlmath.algorithms.value import value_losses

# Two distributions over four tokens: expectations are exact sums, not samples.
LOGITS = torch.tensor([0.3, -1.0, 1.2, 0.1], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.2, 0.9, 0.5], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.0, -0.5, 0.8, 0.4], dtype=torch.float64).log_softmax(0)


def exact_kl(logits):
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - REF)).sum()


def expectation(name, sampler, logits):
    """Mean over tokens drawn from ``sampler`` of the estimate, exactly."""
    logp = logits.log_softmax(0)
    values = kl_estimate(name, logp, REF, sampler)
    return (sampler.exp() * values).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_on_policy_value_is_unbiased(name):
    logp = LOGITS.log_softmax(0)
    assert float(expectation(name, logp, LOGITS)) == pytest.approx(
        float(exact_kl(LOGITS)), rel=1e-12
    )


@pytest.mark.parametrize("name", ["k2", "k3_unbiased"])
def test_on_policy_gradient_is_the_gradient_of_the_kl(name):
    logits = LOGITS.clone().requires_grad_()
    want = torch.autograd.grad(exact_kl(logits), logits)[0]
    got = torch.autograd.grad(expectation(name, LOGITS.log_softmax(0), logits), logits)[0]
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


def test_k1_in_the_loss_has_no_gradient_on_average():
    logits = LOGITS.clone().requires_grad_()
    got = torch.autograd.grad(expectation("k1", LOGITS.log_softmax(0), logits), logits)[0]
    assert torch.allclose(got, torch.zeros(4, dtype=torch.float64), atol=1e-14)


def test_k3_unbiased_is_right_off_policy_too():
    logits = LOGITS.clone().requires_grad_()
    value = expectation("k3_unbiased", OLD, logits)
    want = exact_kl(logits)
    assert float(value.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    got = torch.autograd.grad(value, logits)[0]
    assert torch.allclose(got, torch.autograd.grad(want, logits)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_by_hand_and_gradcheck(name):
    x = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=torch.float64)
    old = torch.tensor([math.log(0.4)], dtype=torch.float64)
    ln2 = math.log(2)
    want = {"k1": ln2, "k2": ln2**2 / 2, "k3": 0.5 - 1 + ln2, "k3_unbiased": 1.25 * (ln2 - 0.5)}
    assert float(kl_estimate(name, x, ref, old).detach()) == pytest.approx(want[name], rel=1e-12)
    assert torch.autograd.gradcheck(lambda v: kl_estimate(name, v, ref, old), x)


def test_k3_keeps_the_digits_of_a_small_difference():
    x, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-12])
    assert float(kl_estimate("k3", x, ref, x)) == pytest.approx(2.0**-25, rel=1e-3)


def test_kl_coefficient_follows_its_target():
    assert next_kl_coef(0.1, 0.06, 0.06, 1000, 100) == 0.1
    assert next_kl_coef(0.1, 9.0, 0.06, 1000, 100) == pytest.approx(0.1 * 1.02)
    assert next_kl_coef(0.1, 0.0, 0.06, 1000, 100) == pytest.approx(0.1 * 0.98)
    assert next_kl_coef(0.1, 0.066, 0.06, 1000, 1000) == pytest.approx(0.11)


def sums(ratio_sum=10.0, tokens=10.0, nonfinite=0.0, signal=1.0, **more):
    return {
        "token/importance_ratio": ratio_sum,
        "count/token": tokens,
        "count/nonfinite": nonfinite,
        "weighted/signal": signal,
        **more,
    }


def test_a_normal_minibatch_is_kept_up_to_and_at_the_threshold():
    assert decide(sums(), 5.0).kind == "keep"
    assert not decide(sums(ratio_sum=50.0), 5.0).discard
    assert decide(sums(), 5.0).reason == ""


def test_a_ratio_over_the_threshold_stops_with_the_numbers():
    got = decide(sums(ratio_sum=51.0), 5.0)
    assert got.kind == "early_stop" and got.discard
    assert "5.1 over 10 tokens" in got.reason and "early_stop_ratio = 5" in got.reason
    assert decide(sums(ratio_sum=51.0), None).kind == "keep"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_anything_not_finite_stops_and_is_named(value):
    got = decide(sums(grad_norm=value), None)
    assert got.kind == "early_stop"
    assert "grad_norm" in got.reason
    assert decide(sums(ratio_sum=value), 5.0).kind == "early_stop"


def test_finite_sums_over_tokens_that_are_not_still_stop():
    got = decide(sums(nonfinite=2.0), 5.0)
    assert got.kind == "early_stop" and "2 of 10 tokens" in got.reason


def test_minibatch_without_signal_is_discarded():
    assert decide(sums(signal=0.0), 5.0).kind == "no_signal"
    assert decide(sums(ratio_sum=0.0, tokens=0.0, signal=0.0), 5.0).kind == "no_signal"
    assert decide(sums(signal=0.0), 5.0).discard


def test_value_loss_by_hand():
    nan = float("nan")
    values = torch.tensor([1.0, 1.0, 1.0, nan], requires_grad=True)
    old = torch.tensor([1.1, 0.5, 0.5, 0.0])
    returns = torch.tensor([3.0, 3.0, 0.0, nan])
    mask = torch.tensor([True, True, True, False])
    # Second: clipped to 0.7, whose error 2.3 is the larger; third: the clipped error is smaller.
    losses = value_losses(values, old, returns, mask, clip=0.2)
    assert losses.tolist() == pytest.approx([2.0, 2.3**2 / 2, 0.5, 0.0])
    assert torch.autograd.grad(losses.sum(), values)[0].tolist() == pytest.approx([-2, 0, 1, 0])
    plain = value_losses(values, old, returns, mask, clip=None)
    assert plain.tolist() == pytest.approx([2.0, 2.0, 0.5, 0.0])


def test_value_losses_pass_gradcheck():
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    old, returns = values + 0.3 * torch.arange(-4, 5) / 4 + 0.01, values.flip(0) + 0.05
    mask = torch.arange(9) != 4
    check = torch.autograd.gradcheck
    assert check(lambda v: value_losses(v, old, returns, mask), values.requires_grad_())


KINDS = AGGREGATIONS.names()


def weights(kind, mask, lengths, groups):
    counts = [sum(row) for row in torch.tensor(mask).split(lengths)]
    found = sequence_weights(kind, torch.tensor(counts), torch.tensor(groups), 10)
    of_tokens = torch.repeat_interleave(found, torch.tensor(lengths))
    return (of_tokens * torch.tensor(mask)).tolist()


# Two sequences of one prompt (2 and 1 tokens), one of another (3 tokens, one of them masked).
CASE = ([1, 1, 1, 1, 0, 1], [2, 1, 3], [7, 7, 4])


BATCH = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", KINDS)
@given(BATCH)
def test_token_weights_agree_with_loops(kind, batch):
    mask = [m for row, _ in batch for m in row]
    lengths, groups = [len(row) for row, _ in batch], [g for _, g in batch]
    want = plain.token_weights(kind, mask, lengths, groups, 10)
    assert weights(kind, mask, lengths, groups) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
@given(BATCH)
def test_means_weigh_one_in_all_or_nothing_is_unmasked(kind, batch):
    mask = [m for row, _ in batch for m in row]
    total = sum(weights(kind, mask, [len(row) for row, _ in batch], [g for _, g in batch]))
    assert total == pytest.approx(1.0 if any(mask) else 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_a_token_in_the_loss_are_not_counted(kind):
    mask, lengths, groups = CASE
    assert weights(kind, [*mask, 0, 0], [*lengths, 2], [*groups, 9])[:6] == weights(kind, *CASE)


def test_errors_name_what_is_wrong():
    three, one = torch.tensor([3]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"aggregation = 'mean'.*token_mean"):
        sequence_weights("mean", three, one)
    with pytest.raises(ValueError, match="2 sequences, but 1 group_ids"):
        sequence_weights("token_mean", torch.tensor([2, 1]), one)
    with pytest.raises(ValueError, match=r"constant_length.*None.*max_response_tokens"):
        sequence_weights("seq_sum_constant", three, one)


@pytest.mark.parametrize("kind", KINDS)
@given(BATCH, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_parts_of_whole_groups_need_only_their_own_lengths(kind, batch, part_of_group):
    counts = torch.tensor([sum(row) for row, _ in batch])
    groups = torch.tensor([group for _, group in batch])
    whole = denominator(kind, counts, groups)
    wanted = sequence_weights(kind, counts, groups, 10)
    parts = torch.tensor(part_of_group)[groups]
    total = 0.0
    for part in range(3):
        own = parts == part
        if not own.any():
            continue
        share = denominator(kind, counts[own], groups[own])
        found = sequence_weights(kind, counts[own], groups[own], 10) * share / max(whole, 1)
        there = counts[own] > 0
        assert found[there].tolist() == pytest.approx(wanted[own][there].tolist(), rel=1e-12)
        total += share
    assert total == whole
