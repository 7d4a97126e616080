import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms import mismatch
from rlmath.algorithms.correction import CorrectionConfig, LagTotals, choose, correct
from rlmath.algorithms.mismatch import measure, measure_by_lag
from rlmath.algorithms.mismatch_causes import likely_cause

ENGINE = torch.tensor([-1.0, -2.0, -0.5, -3.0])


def test_masked_tokens_are_left_out():
    broken = ENGINE.clone()
    broken[1] = float("nan")
    mask = torch.tensor([True, False, True, True])
    assert measure(broken, ENGINE, mask).tokens == 3
    assert measure(broken, ENGINE, mask).metrics()["mean_exp_abs_diff"] == 1.0
    assert math.isnan(measure(broken, ENGINE).metrics()["max_abs_diff"])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_quantiles_are_right_to_a_bin_of_the_difference(scale, share):
    d = scale * torch.randn(20001, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zero = torch.zeros_like(d)
    got = math.log(measure(d, zero).w_quantile(share))
    # The definition: the smallest value that this share of all values does not exceed.
    want = float(d.sort().values[math.ceil(share * d.numel()) - 1])
    assert got == pytest.approx(want, rel=2**-5, abs=2e-8)


@pytest.mark.parametrize("limit", [1e-7, 1e-3, 0.05, 0.7, 200.0])
def test_mismatch_beyond_a_limit(limit):
    d = 0.1 * torch.randn(5001, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d[:3] = torch.tensor([0.0, -90.0, math.nan])
    tokens, mean = measure(d, torch.zeros_like(d)).beyond(limit)
    size = d.abs().nan_to_num(nan=math.inf)
    # Rounded up by a bin at most: what is near the limit may be taken for beyond it.
    bin_width = mismatch.HISTOGRAM_STEP
    assert int((size > limit).sum()) <= tokens <= int((size > limit / bin_width).sum())
    near = size[size.sort().indices[: 5001 - tokens]]
    want = float(near.exp().mean()) if len(near) else 1.0
    assert want <= mean <= 1 + (bin_width * near).expm1().mean().nan_to_num(0.0) + 2e-8


def test_each_number_is_in_a_bin_that_holds_it():
    edges = mismatch._edges()
    near = [edges, *(edges.nextafter(sign * edges.new_tensor(math.inf)) for sign in (1, -1))]
    odd = [0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan]
    d = torch.cat([*near, edges.new_tensor(odd)])
    size, bins = d.abs().nan_to_num(nan=math.inf), mismatch._bins(d, d.abs())
    assert torch.equal(bins.unique(), torch.arange(len(edges) + 1))
    largest = mismatch._largest_in_bins()
    assert (size <= largest[bins]).all()
    assert (bins[d.argsort()].diff() >= 0).all(), "larger numbers, and NaN, are in later bins"
    inside = (size >= edges[-1] / 2**34) & (size < edges[-1])
    assert (largest[bins][inside] <= mismatch.HISTOGRAM_STEP * size[inside]).all()


@given(st.integers(0, 40), st.integers(0, 99))
def test_measurements_of_parts_add_up(cut, seed):
    d = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    zero = torch.zeros_like(d)
    whole = measure(d, zero).metrics()
    parts = (measure(d[:cut], zero[:cut]) + measure(d[cut:], zero[cut:])).metrics()
    assert parts == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("shift", [-800.0, -400.0, -373.0, 0.0, 360.0, 800.0])
def test_the_effective_sample_size_does_not_depend_on_the_size_of_the_weights(shift):
    """All squares vanish, or overflow: the share is that of the relative weights."""
    d = torch.tensor([0.0, math.log(2), math.log(0.5), 0.0], dtype=torch.float64) + shift
    zero = torch.zeros_like(d)
    for got in (measure(d, zero), measure(d[:1], zero[:1]) + measure(d[1:], zero[1:])):
        assert got.metrics()["effective_sample_size"] == pytest.approx(4.5**2 / 6.25 / 4)
    for far in (-1000.0, 1000.0):
        both = (measure(d, zero) + measure(d + far, zero)).metrics()
        assert both["effective_sample_size"] == pytest.approx(4.5**2 / 6.25 / 8)


def test_by_lag_splits_tokens():
    d = torch.tensor([0.1, 0.3, 0.1])
    got = measure_by_lag(d, torch.zeros(3), torch.tensor([0, 3, 0]))
    assert {lag: round(m.metrics()["mean_abs_diff"], 6) for lag, m in got.items()} == {
        0: 0.1,
        3: 0.3,
    }


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 log-probs of the trainer, but 3 of the engine"):
        measure(ENGINE, ENGINE[:3])


# Sequence 0: w = 2, 0.5, 4 (the last masked); sequence 1: w = 8; sequence 2: w = 1.005, 1.
W = torch.tensor([2.0, 0.5, 4.0, 8.0, 1.005, 1.0], dtype=torch.float64)
MASK = torch.tensor([True, True, False, True, True, True])
LENGTHS = torch.tensor([3, 1, 2])


@pytest.mark.parametrize(
    "kind, want",
    [
        ("none", [1, 1, 0, 1, 1, 1]),
        ("token_truncate", [2, 0.5, 0, 2, 1.005, 1]),
        ("token_mask", [2, 0.5, 0, 0, 1.005, 1]),
        ("seq_truncate", [1, 1, 0, 2, 1.005, 1.005]),
        ("seq_mask_geometric", [1, 1, 0, 0, 1, 1]),
        ("seq_mask_sum", [1, 1, 0, 0, 1.005, 1.005]),
    ],
)
def test_each_correction_by_hand(kind, want):
    zero = torch.zeros_like(W)
    got = correct(W.log(), zero, MASK, LENGTHS, CorrectionConfig(kind))
    assert got.weights.tolist() == pytest.approx(want, rel=1e-12)
    assert got.kind == kind


def test_bounds_can_be_moved_and_are_inclusive():
    s = CorrectionConfig("token_mask", low=0.5, high=8.0 * (1 + 1e-12))
    got = correct(W.log(), torch.zeros_like(W), MASK, LENGTHS, s)
    assert got.weights.tolist() == pytest.approx([2, 0.5, 0, 8, 1.005, 1])


def test_one_outlier_vetoes_its_sequence_and_masked_tokens_do_not():
    w = W.clone()
    w[1] = 1e-5
    w[2] = 1e-9
    s = CorrectionConfig("none", veto_below=1e-4)
    got = correct(w.log(), torch.zeros_like(w), MASK, LENGTHS, s)
    assert got.weights.tolist() == [0, 0, 0, 1, 1, 1]
    assert got.totals.metrics()["vetoed_sequences"] == pytest.approx(1 / 3)
    assert got.totals.metrics()["rejected_tokens"] == pytest.approx(2 / 5)
    w[1] = 1.0
    assert correct(w.log(), torch.zeros_like(w), MASK, LENGTHS, s).weights.sum() == 5


def test_correction_totals_by_lag_add_up_over_ranks():
    # Unmasked w: 2 and 0.5 of sequence 0, 8 of sequence 1, 1.005 and 1 of sequence 2.
    settings = CorrectionConfig("token_mask", low=0.6, high=5.0)
    lags = torch.tensor([2, 0, 0, 2, 0, 2])
    zero = torch.zeros_like(W)
    totals = correct(W.log(), zero, MASK, LENGTHS, settings, lags).totals
    # Lag 0: 0.5 is below, 1.005 stays. Lag 2: 8 is above, 2 and 1 stay.
    assert totals.by_lag == {0: LagTotals(2, 1, 0), 2: LagTotals(3, 1, 0)}
    found = totals.metrics()
    assert found["lag_0/rejected_tokens"] == 1 / 2 and found["lag_2/rejected_tokens"] == 1 / 3
    assert found["rejected_tokens"] == 2 / 5
    truncate = CorrectionConfig("token_truncate", high=1.5, veto_below=0.6)
    # Another rank's tokens: w = 2 and 0.5 at lag 1, the second of which vetoes both.
    other = correct(
        W.log()[:3], zero[:3], MASK[:3], LENGTHS[:1], truncate, torch.ones(3).long()
    ).totals
    assert other.by_lag == {1: LagTotals(2, 2, 1)}
    both = (totals + other).metrics()
    assert both["lag_1/rejected_tokens"] == 1 and both["lag_1/truncated_tokens"] == 1 / 2
    assert both["lag_2/rejected_tokens"] == 1 / 3 and both["rejected_tokens"] == 4 / 7
    assert (totals + totals).by_lag[2] == LagTotals(6, 2, 0)
    fresh = correct(W.log(), zero, MASK, LENGTHS, settings, torch.zeros(6).long()).totals
    assert not [name for name in fresh.metrics() if "lag" in name]


@pytest.mark.parametrize(
    "scale, kind", [(1e-6, "none"), (0.02, "token_truncate"), (1.0, "token_mask")]
)
def test_auto_picks_by_its_thresholds_and_says_why(scale, kind):
    d = scale * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    chosen, why = choose(measure(d, torch.zeros_like(d)))
    assert chosen == kind
    assert "mean exp|d| = " in why and "effective sample size = " in why


def test_the_geometric_mean_is_over_unmasked_tokens():
    # 1.015 alone is out of bounds; shared with the masked token it would be 1.0075.
    d = torch.tensor([1.015, 1.0]).log()
    s = CorrectionConfig("seq_mask_geometric")
    got = correct(d, torch.zeros(2), torch.tensor([True, False]), torch.tensor([2]), s)
    assert got.weights.tolist() == [0.0, 0.0]


def test_auto_has_to_be_resolved():
    with pytest.raises(ValueError, match=r"choose\(\)"):
        correct(W, W, MASK, LENGTHS, CorrectionConfig("auto"))


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="add up to 3 tokens, but the mask has 6"):
        correct(W, W, MASK, torch.tensor([3]), CorrectionConfig())


def test_many_tokens_are_measured_in_chunks(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    trainer, engine = (-torch.rand(1000, generator=draw) for _ in range(2))
    mask = torch.rand(1000, generator=draw) > 0.3
    for one in (mask, None):
        monkeypatch.setattr(mismatch, "CHUNK_TOKENS", 10**6)
        at_once = measure(trainer, engine, one)
        monkeypatch.setattr(mismatch, "CHUNK_TOKENS", 64)
        found = measure(trainer, engine, one)
        assert found.metrics() == pytest.approx(at_once.metrics(), rel=1e-12)
        assert torch.equal(found.histogram, at_once.histogram) and found.tokens == at_once.tokens


CAUSE_LENGTHS = torch.tensor([40, 25, 60, 33])
TOKENS = int(CAUSE_LENGTHS.sum())
NOISE = 1e-3


def log_probs(logits, chosen):
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@pytest.fixture(scope="module")
def draws():
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, 50, generator=draw)
    chosen = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
    return logits, chosen


def cause(sampled, engine):
    draw = torch.Generator().manual_seed(1)
    noisy = engine + NOISE / 3 * torch.randn(TOKENS, generator=draw)
    return likely_cause(log_probs(*sampled), noisy, entropy(sampled), CAUSE_LENGTHS, NOISE)


def entropy(sampled):
    every = sampled[0].log_softmax(-1)
    return -(every.exp() * every).sum(-1)


def test_temperature_is_named_with_its_factor(draws):
    logits, chosen = draws
    assert "1.2" in cause(draws, log_probs(logits / 1.25, chosen))
    for factor in (0.7, 0.9, 1.1, 1.3):
        assert "Another temperature" in cause(draws, log_probs(logits / factor, chosen))


@pytest.mark.parametrize("shift", [1, -1])
def test_shift_by_one_token_is_named(draws, shift):
    assert "shift by one token" in cause(draws, log_probs(*draws).roll(shift))


def test_rounding_to_bfloat16_is_named(draws):
    ours = log_probs(*draws)
    found = likely_cause(ours, ours.bfloat16().float(), entropy(draws), CAUSE_LENGTHS, NOISE)
    assert "Rounding to bfloat16" in found


def test_truncated_sampling_is_named(draws):
    logits, chosen = draws
    kept = logits.clone()
    lowest = logits.topk(5).values[:, -1:]
    chosen_logits = logits.gather(1, chosen[:, None])
    kept[logits < torch.minimum(lowest, chosen_logits)] = -torch.inf
    assert "Truncated sampling" in cause(draws, log_probs(kept, chosen))


def test_another_prompt_is_named(draws):
    logits, chosen = draws
    draw = torch.Generator().manual_seed(2)
    fade = torch.cat([0.7 ** torch.arange(n) for n in CAUSE_LENGTHS.tolist()])
    other = logits + 2 * fade[:, None] * torch.randn(logits.shape, generator=draw)
    assert "Another prompt" in cause(draws, log_probs(other, chosen))


def test_unknown_differences_have_no_cause(draws):
    logits, chosen = draws
    draw = torch.Generator().manual_seed(3)
    other = logits + 0.3 * torch.randn(logits.shape, generator=draw)
    assert cause(draws, log_probs(other, chosen)) == ""
    ours = log_probs(*draws)
    assert likely_cause(ours, ours, ours, CAUSE_LENGTHS, NOISE) == ""
    assert likely_cause(ours[:4], ours[:4] + 1, ours[:4], torch.tensor([4]), NOISE) == ""
