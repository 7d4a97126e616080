"""The actor's attention with keys and values in FP8: for a while, and then as before."""

import torch
from torch import nn

from rlmath.actor.quantized_cache import quantized_cache
from rlmath.model.fp8 import DTYPE, LARGEST, cached


class Attention(nn.Module):
    def forward(self, query, key, value, mask, scale=1.0):
        return scale * (query @ key.t()).softmax(-1) @ value


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.core_attention = Attention()
        self.other = Attention()

    def forward(self, query, key, value):
        return tuple(
            one(query, key, value, None, scale=0.5) for one in (self.core_attention, self.other)
        )


def test_attention_takes_keys_and_values_after_fp8_and_is_itself_again():
    torch.manual_seed(0)
    layer, (query, key, value) = Layer(), torch.randn(3, 5, 8)
    usual, other = layer(query, key, value)
    with torch.no_grad(), quantized_cache(layer):
        found, untouched = layer(query, key, value)
    expected = layer.core_attention(query, cached(key), cached(value), None, scale=0.5)
    assert torch.equal(found, expected) and not torch.equal(found, usual)
    assert torch.equal(untouched, other)
    assert torch.equal(layer(query, key, value)[0], usual)


def test_on_a_cpu_bits_are_cut_off_as_vllms_kernels_do():
    """Every number that FP8 has stays; what lies between two becomes the one nearer to 0."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
    numbers = numbers[numbers.isfinite()].sort().values
    assert torch.equal(cached(numbers), numbers)
    above = numbers[numbers >= 0].unique()
    between = torch.cat(
        [(above[1:] - above[:-1]) * part + above[:-1] for part in (0.01, 0.5, 0.99)]
    )
    lower = above[:-1].repeat(3)
    assert torch.equal(cached(between), lower) and torch.equal(cached(-between), -lower)
    far = torch.tensor([448.5, 1e6, -1e6])
    assert torch.equal(cached(far), torch.tensor([LARGEST, LARGEST, -LARGEST]))
    assert cached(between.bfloat16()).dtype == torch.bfloat16
