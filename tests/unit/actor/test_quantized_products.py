"""The actor's products in FP8: as an engine's, for a while, and then as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlmath.actor.quantized_products import MATRICES, quantized_products
from rlmath.model.fp8 import rounded


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.output_layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.linear_fc2(self.linear_fc1(x)))


def test_matrices_of_layers_multiply_in_fp8_and_weights_come_back() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(3, 8)
    weights = {name: (one.data_ptr(), one.clone()) for name, one in layer.named_parameters()}
    usual = layer(x)
    with torch.no_grad(), quantized_products(layer):
        found = layer(x)
    for one in (layer.linear_fc1, layer.linear_fc2):
        x = nn.functional.linear(rounded(x), rounded(one.weight.data), one.bias)
    assert torch.equal(found, layer.output_layer(x)) and not torch.equal(found, usual)
    with torch.no_grad(), quantized_products(layer), pytest.raises(RuntimeError):
        layer(torch.randn(3, 7))
    for name, parameter in layer.named_parameters():
        place, values = weights[name]
        assert parameter.data_ptr() == place and torch.equal(parameter, values)
    assert not layer.linear_fc1._forward_pre_hooks and not layer.linear_fc1._forward_hooks


def test_names_are_megatrons() -> None:
    assert MATRICES == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
