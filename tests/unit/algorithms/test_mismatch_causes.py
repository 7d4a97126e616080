"""Differences of log-probs with a known cause, from random logits."""

import pytest
import torch

from rlmath.algorithms.mismatch_causes import likely_cause

LENGTHS = torch.tensor([40, 25, 60, 33])
TOKENS = int(LENGTHS.sum())
NOISE = 1e-3


def log_probs(logits, chosen):
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@pytest.fixture(scope="module")
def sampled():
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, 50, generator=draw)
    chosen = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
    return logits, chosen


def cause(sampled, engine):
    draw = torch.Generator().manual_seed(1)
    noisy = engine + NOISE / 3 * torch.randn(TOKENS, generator=draw)
    return likely_cause(log_probs(*sampled), noisy, entropy(sampled), LENGTHS, NOISE)


def entropy(sampled):
    every = sampled[0].log_softmax(-1)
    return -(every.exp() * every).sum(-1)


def test_temperature_is_named_with_its_factor(sampled):
    logits, chosen = sampled
    assert "1.2" in cause(sampled, log_probs(logits / 1.25, chosen))
    for factor in (0.7, 0.9, 1.1, 1.3):
        assert "Another temperature" in cause(sampled, log_probs(logits / factor, chosen))


@pytest.mark.parametrize("shift", [1, -1])
def test_shift_by_one_token_is_named(sampled, shift):
    assert "shift by one token" in cause(sampled, log_probs(*sampled).roll(shift))


def test_rounding_to_bfloat16_is_named(sampled):
    ours = log_probs(*sampled)
    found = likely_cause(ours, ours.bfloat16().float(), entropy(sampled), LENGTHS, NOISE)
    assert "Rounding to bfloat16" in found


def test_truncated_sampling_is_named(sampled):
    logits, chosen = sampled
    kept = logits.clone()
    lowest = logits.topk(5).values[:, -1:]
    chosen_logits = logits.gather(1, chosen[:, None])
    kept[logits < torch.minimum(lowest, chosen_logits)] = -torch.inf
    assert "Truncated sampling" in cause(sampled, log_probs(kept, chosen))


def test_another_prompt_is_named(sampled):
    logits, chosen = sampled
    draw = torch.Generator().manual_seed(2)
    fade = torch.cat([0.7 ** torch.arange(n) for n in LENGTHS.tolist()])
    other = logits + 2 * fade[:, None] * torch.randn(logits.shape, generator=draw)
    assert "Another prompt" in cause(sampled, log_probs(other, chosen))


def test_unknown_differences_have_no_cause(sampled):
    logits, chosen = sampled
    draw = torch.Generator().manual_seed(3)
    other = logits + 0.3 * torch.randn(logits.shape, generator=draw)
    assert cause(sampled, log_probs(other, chosen)) == ""
    ours = log_probs(*sampled)
    assert likely_cause(ours, ours, ours, LENGTHS, NOISE) == ""
    assert likely_cause(ours[:4], ours[:4] + 1, ours[:4], torch.tensor([4]), NOISE) == ""
