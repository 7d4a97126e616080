"""Fingerprints of what engines in FP8 hold: parts of a worker add up to the whole."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.model.fp8 import quantized
from rlmath.weights.fingerprint import add
from rlmath.weights.quantized_prints import is_quantized, quantized_fingerprints
from rlmath.weights.transports.engine_fingerprints import _of_quantized
from rlmath.weights.transports.engine_parts import Part


def test_matrices_of_layers_are_quantized_and_nothing_else():
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        assert is_quantized(f"model.layers.0.{name}")
    for name in ("self_attn.q_proj.bias", "input_layernorm.weight", "mlp.gate.weight"):
        assert not is_quantized(f"model.layers.0.{name}")
    assert not is_quantized("model.embed_tokens.weight") and not is_quantized("lm_head.weight")


def worker(whole, dim, rank):
    """vLLM's layer of a tensor rank of two, quantized by the whole's rows."""
    values, scale = quantized(whole)
    size = whole.shape[dim] // 2
    mine = values.narrow(dim, rank * size, size)
    scale = scale.narrow(0, rank * size, size) if dim == 0 else scale
    parameters = {"weight": mine.t(), "weight_scale": scale}
    return SimpleNamespace(**{n: torch.nn.Parameter(p, False) for n, p in parameters.items()})


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_add_up_and_a_change_is_seen(dim):
    torch.manual_seed(0)
    whole = torch.randn(8, 12)
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = quantized_fingerprints([(name, whole), ("norm.weight", torch.ones(3))])
    assert set(wanted) == {name, f"{name}_scale", "norm.weight"}

    def found(layers):
        sums = [0, 0]
        for rank, layer in enumerate(layers):
            size = whole.shape[dim] // 2
            part = Part(name, layer, "weight", 0, dim, rank * size, size)
            rows = size if dim == 0 else 8
            start = rank * size if dim == 0 else 0
            scales = Part(f"{name}_scale", layer, "weight_scale", 0, 0, start, rows, rank > 0)
            for place, one in enumerate((part, scales)):
                value = _of_quantized(one)
                assert value is not None
                # A worker counts no replica.
                sums[place] = add(sums[place], 0 if place and dim == 1 and rank else value)
        return sums[0], sums[1]

    layers = [worker(whole, dim, rank) for rank in (0, 1)]
    assert found(layers) == (wanted[name], wanted[f"{name}_scale"])
    layers[1].weight.data.view(torch.uint8)[2, 1] ^= 1
    assert found(layers)[0] != wanted[name] and found(layers)[1] == wanted[f"{name}_scale"]
    other = SimpleNamespace(
        weight=torch.nn.Parameter(torch.zeros(3, 3)), weight_scale=torch.nn.Parameter(torch.ones(1))
    )
    assert _of_quantized(Part(name, other, "weight", 0, 0, 0, 3)) is None
