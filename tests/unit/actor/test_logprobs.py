"""Log-probs of vocabulary slices, against torch's softmax and the formula of their gradient."""

import pytest
import torch

from rlmath.actor import logprobs
from rlmath.actor.logprobs import Distribution, vocab_parallel_log_probs

TOKENS, ROWS, VOCAB, PADDED = 40, 25, 50, 56
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(logprobs, "ROWS_PER_CHUNK", 8)


def make_inputs(seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, PADDED, generator=random).mul_(3).to(dtype)
    rows = torch.randperm(TOKENS, generator=random)[:ROWS].sort().values
    return logits, rows, torch.randint(VOCAB, (ROWS,), generator=random)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_values_and_gradients_are_those_of_torch(batch_invariant):
    logits, rows, targets = make_inputs()
    factors = torch.linspace(-1, 1, ROWS)
    results = []
    for ours in (True, False):
        x = logits.clone().requires_grad_()
        if ours:
            log_probs, entropy = vocab_parallel_log_probs(
                x,
                rows,
                targets,
                Distribution(
                    temperature=TEMPERATURE, vocab_size=VOCAB, batch_invariant=batch_invariant
                ),
            )
        else:
            log_p = torch.log_softmax(x[rows, :VOCAB].double() / TEMPERATURE, 1)
            log_probs = log_p[torch.arange(ROWS), targets]
            entropy = -(log_p.exp() * log_p).sum(1)
        ((log_probs + 0.5 * entropy) * factors).sum().backward()
        results.append((log_probs.detach().double(), entropy.detach().double(), x.grad.double()))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=2e-6, atol=2e-6)
    # Rows that nobody asked for, and the vocabulary's padding.
    untouched = torch.ones(TOKENS, dtype=torch.bool)
    untouched[rows] = False
    assert not results[0][2][untouched].any() and not results[0][2][:, VOCAB:].any()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_slice_bit_by_bit(rank, dtype):
    """Half the vocabulary: targets of the other half get nothing, in whatever place they stand."""
    half = PADDED // 2
    logits, rows, targets = make_inputs(1, dtype)
    x = logits[:, rank * half : (rank + 1) * half].clone().requires_grad_()
    valid = min(half, VOCAB - rank * half)
    log_probs, _ = vocab_parallel_log_probs(
        x, rows, targets, Distribution(temperature=TEMPERATURE, vocab_size=VOCAB, rank=rank)
    )
    factors = torch.linspace(-1, 1, ROWS)
    (log_probs * factors).sum().backward()
    scaled = x.detach()[rows, :valid].float() / TEMPERATURE
    top = scaled.amax(1)
    log_z = top + torch.cat(
        [(part - part.amax(1, keepdim=True)).exp().sum(1).log() for part in scaled.split(8)]
    )
    expected = -factors[:, None] * (scaled - log_z[:, None]).exp()
    for row, target in enumerate((targets - rank * half).tolist()):
        if 0 <= target < valid:
            expected[row, target] += factors[row]
    assert torch.equal(x.grad[rows, :valid], (expected / TEMPERATURE).to(dtype))
    assert 0 < int(((targets >= rank * half) & (targets < rank * half + valid)).sum()) < ROWS


def test_a_slice_of_nothing_but_padding():
    logits, rows, targets = make_inputs()
    x = logits[:, :4].clone().requires_grad_()
    log_probs, _ = vocab_parallel_log_probs(
        x, rows, targets, Distribution(temperature=1.0, vocab_size=VOCAB, rank=20)
    )
    log_probs.sum().backward()
    assert x.grad is not None and not x.grad.any()
