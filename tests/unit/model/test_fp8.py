"""FP8 as engines compute: against vLLM's own quantization, bit by bit, and by its bounds."""

import pytest
import torch

from rlmath.model.fp8 import DTYPE, LARGEST, quantized, rounded

TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_within_half_a_unit_and_repeat(dtype):
    torch.manual_seed(0)
    rows = torch.randn(64, 128).mul_(torch.logspace(-2, 3, 64)[:, None]).to(dtype)
    values, scale = quantized(rows)
    assert values.dtype == DTYPE and scale.shape == (64, 1)
    assert (values.float().abs().amax(1) == LARGEST).all()
    # Three bits of mantissa; below 2**-6 the numbers are 2**-9 apart.
    back = values.double() * scale.double()
    allowed = torch.maximum(rows.double().abs() * 2**-4, scale.double() * 2**-10) * 1.01
    assert ((back - rows.double()).abs() <= allowed).all()
    if dtype is torch.float32:
        again, _ = quantized(rounded(rows))
        assert (again.float() - values.float()).abs().max() <= 32  # One unit at the top.


def test_zeros_stay_zero():
    values, scale = quantized(torch.zeros(2, 8))
    assert not values.float().any() and scale.isfinite().all() and (scale > 0).all()
    assert not rounded(torch.zeros(2, 8)).any()
