"""Operators of a CPU in bfloat16, against the same in float64."""

import pytest
import torch

from rlmath.device.cpu_ops import attend, rms_norm

# Half the distance of two neighboring bfloat16 numbers, of their size.
HALF_ULP = 2.0**-9


def test_a_row_is_not_scaled_by_the_rounding_of_its_mean_square():
    torch.manual_seed(0)
    x = (torch.randn(64, 576, dtype=torch.float64) * 3).bfloat16()
    weight = torch.ones(576, dtype=torch.bfloat16)
    found = rms_norm(x, weight, 1e-5).double()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scales = (found * expected).sum(-1) / expected.square().sum(-1)
    assert (found / expected - 1).abs().max() < 2 * HALF_ULP
    assert (scales - 1).abs().max() < HALF_ULP / 4


def test_gradients_of_a_norm_have_the_type_of_what_it_norms():
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("length", [1, 90, 300], ids="{} tokens".format)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_attention_and_its_gradients(length, masked):
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, length, 16).bfloat16() for heads in (6, 2, 2)]
    mask = torch.ones(length, length, dtype=torch.bool).tril_().triu_(-7) if masked else None
    grad = torch.randn(2, 6, length, 16).bfloat16()

    def gradients(dtype):
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves, mask, 0.25)
        out.backward(grad.to(dtype))
        assert out.dtype == dtype
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    for found, expected in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        # A single key takes no gradient by way of its score.
        assert (found.double() - expected).norm() <= 8 * HALF_ULP * expected.norm() + 1e-6
