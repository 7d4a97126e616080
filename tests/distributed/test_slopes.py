"""The gradient against forward passes with moved weights, on real ranks: nothing is said of a
healthy one, a gradient that doubles is named, and weights stay bit for bit as without."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.step_probe import FINDINGS, OTHER_SLOPE, StepFinding
from rlmath.commands.drill.in_update import double_below_a_layer
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.parallel import Layout
from tests.support.actors import UPDATE, build, make_batch, with_log_probs

LORA = {"lora": Lora(rank=4, alpha=8.0, targets=TARGETS)}
ROUNDED = {"model": ModelSettings(torch.bfloat16, sequence_parallel=True)}


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
