"""Fingerprints of a matrix that an engine holds packed, and wider than the model."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.weights.fingerprint import fingerprint
from rlmath.weights.transports.engine_fingerprints import _of_packed
from rlmath.weights.transports.engine_parts import Part


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_router_in_float32_has_the_fingerprint_of_what_was_sent(kept):
    """In a bfloat16 model with ``precision.router_dtype=float32`` vLLM packs it in float32."""
    sent = torch.randn(8, 300, generator=torch.manual_seed(1)).bfloat16()

    def product(inputs, *_):
        return inputs.to(kept) @ sent.to(kept).t()

    module = SimpleNamespace(cpu_linear=product, input_size=300, weight=torch.empty(0).bfloat16())
    part = Part("gate.weight", module, "weight", 0, 0, 0, 8)
    assert _of_packed([part], torch.bfloat16) == [fingerprint(sent)]
    sent[3, 299] += 1
    assert _of_packed([part], torch.bfloat16) == [fingerprint(sent)]
    before = fingerprint(sent)
    sent[0, 0] = -sent[0, 0]
    assert _of_packed([part], torch.bfloat16) != [before]
