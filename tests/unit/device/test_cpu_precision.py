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


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 8 * HALF_ULP)], ids=str
)
def test_gradients_of_a_norm(dtype, error):
    torch.manual_seed(0)
    made = [3 * torch.randn(5, 64), 1 + torch.randn(64) / 4, torch.randn(5, 64)]
    x, weight, grad = (one.to(dtype) for one in made)
    rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5).backward(grad)
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    norm = wide[0] / (wide[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
    norm.backward(grad.double())
    for found, expected in zip((x.grad, weight.grad), (one.grad for one in wide), strict=True):
        assert found.dtype == dtype
        assert (found - expected).abs().max() < error * expected.abs().max()


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
