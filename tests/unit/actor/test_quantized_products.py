"""The actor's products in FP8: as an engine's, for a while, and then as before."""

import pytest
import torch
from torch import nn

from rlmath.actor.lora import Adapter, attach_adapter
from rlmath.actor.quantized_products import MATRICES, quantized_products
from rlmath.model.families import Rule
from rlmath.model.fp8 import rounded
from rlmath.model.lora import Lora
from rlmath.weights.adapters import AdapterLayout
from rlmath.weights.pieces import LocalTensor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.output_layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.output_layer(self.linear_fc2(self.linear_fc1(x)))


def test_matrices_of_layers_multiply_in_fp8_and_weights_come_back():
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


class Matrix(nn.Linear):
    """As Megatron's give their output and a bias."""

    def forward(self, x):
        return super().forward(x), None

    def sharded_state_dict(self):
        return {}


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_proj = Matrix(8, 16).bfloat16()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_adapter_is_rounded_with_its_matrix_as_engines_get_it(enabled):
    torch.manual_seed(0)
    stage, x = Stage(), torch.randn(3, 8).bfloat16()
    parts = ("x.o_proj.weight",)
    shapes = (LocalTensor((2, 8), ()), LocalTensor((16, 2), ()))
    layout = AdapterLayout(parts, (((0, 16),),), Rule.row, *shapes)
    adapter = Adapter(layout, Lora(2, 3.0, ("o_proj",)), torch.empty(0).bfloat16(), False)
    torch.nn.init.normal_(adapter.a)
    torch.nn.init.normal_(adapter.b)
    adapter.enabled = enabled
    matrix = stage.linear_proj
    attach_adapter(matrix, adapter)
    with torch.no_grad():
        product = 1.5 * adapter.b.float() @ adapter.a.float()
    weight = matrix.weight.data
    if enabled:
        weight = (weight.float() + product).bfloat16()
    expected = nn.functional.linear(rounded(x), rounded(weight), matrix.bias)
    with torch.no_grad(), quantized_products(stage):
        found, _ = matrix(x)
    assert adapter.enabled is enabled
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_names_are_megatrons():
    assert MATRICES == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
