"""Merging an adapter into a matrix: in float32, rounded once, for any rows and columns."""

from unittest import mock

import pytest
import torch

from rlmath.actor.lora import Adapter
from rlmath.model.families import Rule
from rlmath.model.lora import Lora
from rlmath.weights.adapters import AdapterLayout
from rlmath.weights.pieces import LocalTensor

RANK, ROWS, COLUMNS = 4, 24, 16
LORA = Lora(RANK, 3.0, ("q_proj", "v_proj"))
# Rows 0 to 7 and 12 to 15 belong to the first matrix, 16 to 19 to the second, the others to none.
RUNS = (((0, 8), (12, 4)), ((16, 4),))


def adapter(rule, dtype):
    by_columns = rule is Rule.row
    parts = ("x.q_proj.weight", "x.v_proj.weight")[: 1 if by_columns else 2]
    layout = AdapterLayout(
        parts,
        (((0, ROWS),),) if by_columns else RUNS,
        rule,
        LocalTensor((len(parts) * RANK, COLUMNS), ()),
        LocalTensor((ROWS, RANK), ()),
    )
    made = Adapter(layout, LORA, torch.empty(0, dtype=dtype), sequence_parallel=False)
    torch.manual_seed(0)
    with torch.no_grad():
        made.a.normal_()
        made.b.normal_()
    return made


def expected_product(made, weight):
    """Row by row in float64."""
    whole = weight.double()
    for place, runs in enumerate(made.layout.rows):
        a = made.a[place * RANK : (place + 1) * RANK].double()
        for first, length in runs:
            for row in range(first, first + length):
                whole[row] += 0.75 * made.b[row].double() @ a
    return whole.detach()


@pytest.mark.parametrize("rule", [Rule.qkv, Rule.row], ids=str)
@pytest.mark.parametrize("elements", [1, 3 * COLUMNS, 1 << 24])
def test_rows_and_columns_are_those_of_the_whole(rule, elements):
    made, weight = adapter(rule, torch.float32), torch.randn(ROWS, COLUMNS)
    whole = expected_product(made, weight)
    with mock.patch("rlmath.actor.lora.MERGED_ELEMENTS", elements):
        for dim, start, length in ((0, 0, ROWS), (0, 5, 13), (0, 15, 2), (1, 0, 16), (1, 3, 7)):
            part = weight.narrow(dim, start, length)
            merged = made.merge(part, made.a, made.b, dim, start)
            same = whole.narrow(dim, start, length).float()
            torch.testing.assert_close(merged, same)
    assert torch.equal(whole[8:12], weight[8:12].double()) == (rule is Rule.qkv)


def test_the_sum_is_rounded_once():
    """A product rounded to bfloat16 before it is added, or a sum in bfloat16, differs from it."""
    made, weight = adapter(Rule.row, torch.bfloat16), torch.randn(ROWS, COLUMNS).bfloat16()
    merged = made.merge(weight, made.a, made.b, 0, 0)
    assert merged.dtype == torch.bfloat16
    once = (weight.float() + 0.75 * (made.b.float() @ made.a.float())).bfloat16()
    assert torch.equal(merged, once.detach())
    twice = weight + 0.75 * (made.b @ made.a)
    assert not torch.equal(merged, twice)


def test_untrained_rows_have_no_gradient_and_change_nothing():
    made = adapter(Rule.qkv, torch.float64)
    wide = made._wide(made.b)
    wide.square().sum().backward()
    unused = torch.ones(ROWS, dtype=torch.bool)
    for runs in RUNS:
        for first, length in runs:
            unused[first : first + length] = False
    assert not made.b.grad[unused].any() and made.b.grad[~unused].all()
    assert not wide[unused].any()
