"""A teacher's term in the advantage: against plain loops, and its gradient against the KL's own."""

import math
import random

import pytest
import torch

from rlmath.algorithms.advantages import ADVANTAGES, AdvantageSettings, sequence_advantages
from rlmath.algorithms.distillation import PARTS, DistillTotals, distill
from rlmath.utils.setting import Options

NAN = float("nan")


def plain(old, teacher, mask, lengths, coef, clip):
    """In loops and Python's floats: advantages, and the metrics."""
    advantages, values, by_part, clipped, place = [], [], [[] for _ in range(4)], 0, 0
    for length in lengths:
        for t in range(length):
            difference = teacher[place] - old[place]
            bounded = max(-clip, min(clip, difference))
            advantages.append(coef * bounded if mask[place] else 0.0)
            if mask[place]:
                values.append(-bounded)
                by_part[4 * t // length].append(-bounded)
                clipped += bounded != difference
            place += 1
    count = max(1, len(values))
    metrics = {"reverse_kl": sum(values) / count, "clipped_share": clipped / count}
    metrics |= {f"reverse_kl_part_{i}": sum(p) / len(p) for i, p in enumerate(by_part, 1) if p}
    return advantages, metrics, sorted(values)


def make_inputs(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 13) for _ in range(9)]
    total = sum(lengths)
    old = [-rng.expovariate(1.0) for _ in range(total)]
    teacher = [-math.inf if rng.random() < 0.05 else -rng.expovariate(0.3) for _ in range(total)]
    return old, teacher, [rng.random() < 0.8 for _ in range(total)], lengths


def run(old, teacher, mask, lengths, coef=0.7, clip=5.0):
    return distill(
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(teacher, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor(lengths),
        coef=coef,
        clip=clip,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("clip", [0.5, 5.0, 1e6])
def test_agrees_with_plain_loops(seed, clip):
    batch = make_inputs(seed)
    found = run(*batch, clip=clip)
    advantages, metrics, values = plain(*batch, 0.7, clip)
    assert found.advantages.dtype == torch.float32
    assert found.advantages.tolist() == pytest.approx(advantages, rel=1e-6)
    logged = found.totals.metrics()
    p99 = logged.pop("reverse_kl_p99")
    assert logged == pytest.approx(metrics, rel=1e-10)
    exact = values[max(1, math.ceil(0.99 * len(values))) - 1]
    if -20 < exact < 40:
        assert exact - 1e-9 <= p99 <= exact + 0.05 + 1e-9


def test_totals_of_parts_add_up_to_those_of_the_whole():
    old, teacher, mask, lengths = make_inputs(3)
    whole = run(old, teacher, mask, lengths)
    cut = sum(lengths[:4])
    first = run(old[:cut], teacher[:cut], mask[:cut], lengths[:4])
    second = run(old[cut:], teacher[cut:], mask[cut:], lengths[4:])
    assert (first.totals + second.totals).metrics() == pytest.approx(whole.totals.metrics())
    joined = torch.cat([first.advantages, second.advantages])
    assert torch.equal(joined, whole.advantages)


def test_a_teacher_that_is_the_policy_teaches_nothing():
    old, _, mask, lengths = make_inputs(1)
    found = run(old, old, mask, lengths)
    assert not found.advantages.any()
    assert found.totals.metrics()["reverse_kl"] == 0.0


def test_distillation_gradient_is_that_of_the_reverse_kl():
    """Summed over a small vocabulary instead of sampled; without the bound."""
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 11, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    tokens = log_probs.numel()
    found = distill(
        log_probs.detach().flatten(),
        teacher.flatten(),
        torch.ones(tokens, dtype=torch.bool),
        torch.tensor([tokens]),
        coef=1.0,
        clip=1e9,
    )
    advantages = found.advantages.double().view_as(log_probs)
    # The loss of a token is -A log pi, its chance pi.
    loss = -(log_probs.detach().exp() * advantages * log_probs).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_nan_teacher_log_probs_in_the_loss_are_an_error():
    mask = [True, True]
    with pytest.raises(ValueError, match="1 of 2 log-probs"):
        run([-1.0, -1.0], [NAN, -1.0], mask, [2])
    found = run([-1.0, -1.0], [NAN, -1.0], [False, True], [2])
    assert found.advantages.tolist() == [0.0, 0.0]


def test_distillation_metrics_without_loss_tokens():
    totals = run([-1.0], [-2.0], [False], [1]).totals
    assert totals.metrics() == {"reverse_kl": 0.0, "reverse_kl_p99": 0.0, "clipped_share": 0.0}
    assert isinstance(totals, DistillTotals) and len(totals.tokens) == PARTS


def test_the_estimator_reads_no_reward():
    rewards = torch.tensor([1.0, NAN, -5.0, 0.0])
    ids, counts = torch.tensor([0, 0, 1, 2]), torch.tensor([3, 1, 0, 2])
    assert not ADVANTAGES.get("teacher")(rewards, ids, Options()).any()
    found = sequence_advantages(rewards, ids, counts, AdvantageSettings("teacher"))
    assert found.values.tolist() == [0.0] * 4
