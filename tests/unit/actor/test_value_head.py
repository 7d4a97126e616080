from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.value import ValueHead

WIDTH = 64


def head(dtype):
    config = SimpleNamespace(sequence_parallel=False, hidden_size=WIDTH, params_dtype=dtype)
    made = ValueHead(config, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        made.weight.normal_(std=0.3)
        made.bias.fill_(5.0)
    return made


@pytest.mark.parametrize("positions", [3, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_float64(positions, dtype):
    made = head(dtype)
    hidden = torch.randn(positions, 1, WIDTH, dtype=dtype, requires_grad=True)
    values, bias = made(hidden)
    assert bias is None and values.shape == (positions, 1, 1) and values.dtype == torch.float32
    exact = [one.detach().double().requires_grad_() for one in (hidden, made.weight, made.bias)]
    expected = torch.nn.functional.linear(*exact)
    # Rounded to bfloat16 they would be up to 0.03 off.
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-5)
    wanted = torch.randn(positions, 1, 1)
    (values * wanted).sum().backward()
    (expected * wanted.double()).sum().backward()
    one_rounding = 2**-8 if dtype is torch.bfloat16 else 1e-5
    for found, reference in zip((hidden, made.weight, made.bias), exact, strict=True):
        assert found.grad is not None and found.grad.dtype == dtype and reference.grad is not None
        torch.testing.assert_close(
            found.grad.double(), reference.grad, rtol=one_rounding, atol=1e-3
        )


def test_no_gradient_is_kept_for_values_alone():
    with torch.no_grad():
        values, _ = head(torch.bfloat16)(torch.randn(5, 1, WIDTH, dtype=torch.bfloat16))
    assert values.grad_fn is None
