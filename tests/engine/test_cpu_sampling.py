"""Sampling on CPU: the right distribution, from streams that belong to one request each."""

import pytest
import torch
from torch import Generator
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rlmath.engines.patches.cpu_sampling import forward_cpu


@pytest.fixture(scope="module")
def sampler():
    current_platform.import_kernels()
    return TopKTopPSampler("processed_logprobs")


def _generators(*seeds):
    return {row: Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def _draw(sampler, logits, of):
    return forward_cpu(sampler, logits.clone(), of, None, None)[0].view(-1)


def test_tokens_come_as_often_as_their_probability_says(sampler):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    rows, rounds = 500, 100
    generators = _generators(*range(rows))
    drawn = [_draw(sampler, logits.expand(rows, -1), generators) for _ in range(rounds)]
    for counted in (torch.cat(drawn), drawn[0], torch.stack([d[0] for d in drawn])):
        counts = torch.bincount(counted, minlength=6).double()
        expected = logits.double().softmax(0) * counted.numel()
        if expected.min() < 5:
            counts, expected = (torch.cat([x[:4], x[4:].sum(0)[None]]) for x in (counts, expected))
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        # The 99.9 % quantile for 5 degrees of freedom.
        assert chi_squared < 20.5, counts
    # Successive tokens of one request do not hang together.
    first, second = (torch.cat(part) for part in (drawn[:-1], drawn[1:]))
    joint = torch.bincount(first * 6 + second, minlength=36).view(6, 6).double()
    expected = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True) / joint.sum()
    # 25 degrees of freedom.
    assert float(((joint - expected) ** 2 / expected).sum()) < 52.6


def test_a_request_draws_the_same_whoever_is_beside_it(sampler):
    logits = torch.randn(3, 300, generator=Generator().manual_seed(0))
    together = _generators(7, 2**63 - 1, 8)
    alone = Generator().manual_seed(2**63 - 1)
    seen = []
    for _ in range(20):
        seen.append(int(_draw(sampler, logits, together)[1]))
        assert int(_draw(sampler, logits[1:2], {0: alone})[0]) == seen[-1]
    assert len(set(seen)) > 10


def test_log_probs_are_those_of_what_is_sampled_from(sampler):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    k = torch.tensor([2])
    drawn, log_probs = forward_cpu(sampler, logits.clone(), _generators(1), k, None)
    assert int(drawn[0]) < 2
    kept = torch.tensor([3.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(log_probs[0, :2], kept)
    assert torch.isinf(log_probs[0, 2:]).all()


def test_rows_without_a_seed_differ(sampler):
    drawn = _draw(sampler, torch.zeros(200, 1000), {})
    assert len(set(drawn.tolist())) > 150
