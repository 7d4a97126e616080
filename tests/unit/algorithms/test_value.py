"""The value model's clipped loss."""

import pytest
import torch

from rlmath.algorithms.value import value_losses


def test_by_hand():
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


def test_gradcheck():
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    old, returns = values + 0.3 * torch.arange(-4, 5) / 4 + 0.01, values.flip(0) + 0.05
    mask = torch.arange(9) != 4
    check = torch.autograd.gradcheck
    assert check(lambda v: value_losses(v, old, returns, mask), values.requires_grad_())


def test_a_clip_that_cannot_work_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="value clip = 0"):
        value_losses(one, one, one, one.bool(), clip=0.0)
