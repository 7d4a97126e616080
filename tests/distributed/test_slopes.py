"""The gradient against forward passes with moved weights, on real ranks: nothing is said of a
healthy one, a gradient that doubles is named, and weights stay bit for bit as without."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from rlmath.actor import slopes
from rlmath.actor.model import ModelSettings
from rlmath.actor.slopes import Slopes
from rlmath.actor.step_probe import FINDINGS, OTHER_SLOPE, StepFinding
from rlmath.commands.drill.in_update import double_below_a_layer
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.parallel import Layout
from tests.contracts.fake_cuda import LiveBytes
from tests.support.actors import UPDATE, build, make_batch, with_log_probs

LORA = {"lora": Lora(rank=4, alpha=8.0, targets=TARGETS)}
ROUNDED = {"model": ModelSettings(torch.bfloat16, sequence_parallel=True)}


@mock.patch.object(slopes, "ELEMENTS_AT_ONCE", 1000)
def run(layout, platform, model, batch, changes):
    found, weights = [], []
    for compares in (False, True):
        actor = build(layout, platform, model, **changes)
        if not compares:
            actor._compare_slopes = lambda share: StepFinding()
        for seed in (0, 1):
            found += actor.update(batch, UPDATE, seed).step_findings
            # Adapters begin without a gradient in half of their factors.
            actor.updates = 0
        weights.append([one.detach().clone() for one in actor.module.parameters()])
    same = all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    double_below_a_layer(SimpleNamespace(actor=actor))
    return same, found, actor.update(batch, UPDATE, seed=2).step_findings


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(2, 1, 2), {}),
        (Layout(1, 2, 1, context_parallel=2, pipeline_layers=(1, 3)), {}),
        pytest.param(Layout(2, 1, 1), LORA, marks=pytest.mark.long),
        (Layout(1, 1, 2), ROUNDED),
    ],
    ids=str,
)
def test_only_a_wrong_gradient_is_named_and_weights_are_as_without(
    layout, changes, ranks, tiny_model
):
    batch = with_log_probs(make_batch())
    for same, healthy, faulty in ranks.run(layout, run, tiny_model, batch, changes):
        assert same
        assert {FINDINGS[int(one.kind)] for _, one in healthy} == {""}
        assert faulty[0][1].kind == OTHER_SLOPE


def slopes_of(dtype, elements, logit, length, factor=1.0, tokens=50):
    """Slopes for tokens with equal logits and gradients of random directions and this length."""
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(tokens, elements, generator=draw) * length / elements**0.5
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(elements, dtype=dtype))

    def log_probs():
        return F.logsigmoid(logit + directions @ module.weight.float()).double().sum()

    (gradient,) = torch.autograd.grad(log_probs(), module.weight)
    module.weight.main_grad = factor * gradient.float()
    return Slopes([module], SimpleNamespace(), dtype, lambda: (float(log_probs()), tokens))


def run_certain(layout, platform):
    # Probabilities of 1 - 5e-3 and 1 - 1e-4.
    of_certain = [
        slopes_of(torch.bfloat16, 256, 5.3, 1.0, factor).finding().kind for factor in (1.0, 2.0)
    ]
    return [*of_certain, slopes_of(torch.float32, 256, 9.2, 3000.0).finding().kind]


def test_nearly_certain_tokens_are_no_fault(ranks):
    """Moved by a fixed change of the log-probs, they lose a hundred times what the gradient says,
    in proportion to the move, as by a fault."""
    assert ranks.run(Layout(1, 1, 1), run_certain) == [[0.0, OTHER_SLOPE, 0.0]]


@mock.patch.object(slopes, "ELEMENTS_AT_ONCE", 1 << 10)
def run_large(layout, platform):
    one = slopes_of(torch.bfloat16, 1 << 16, 0.0, 1.0, tokens=4)
    with LiveBytes("cpu") as memory:
        assert not one.finding().kind
    return memory.peak


def test_large_tensor_is_in_float32_a_part_at_a_time(ranks):
    """The copy in host memory has 2 bytes an element, and the model here 4 when it runs; whole
    tensors in float32 and float64 had 22."""
    (peak,) = ranks.run(Layout(1, 1, 1), run_large)
    assert peak < 8 << 16
