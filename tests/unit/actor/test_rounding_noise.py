"""Which modules count as rounding, and by how much their outputs move."""

import pytest
import torch
from torch import nn

from rlmath.actor.rounding_noise import rounded_modules, rounding_noise


class RowParallelLinear(nn.Linear):
    """Megatron's give their bias besides."""

    def forward(self, x):
        return super().forward(x), None


class RotaryEmbedding(nn.Identity):
    pass


class LanguageModelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(8, 16)


def test_the_innermost_modules_count_once_and_angles_never():
    model = nn.ModuleList([LanguageModelEmbedding(), RotaryEmbedding(), nn.RMSNorm(16), nn.SiLU()])
    assert [type(one).__name__ for one in rounded_modules(model)] == ["Embedding", "RMSNorm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_moves_by_at_most_one_unit_in_the_last_place(dtype):
    layer = RowParallelLinear(32, 64, dtype=dtype)
    x = torch.randn(50, 32, dtype=dtype)
    usual, _ = layer(x)
    with rounding_noise(layer, seed=1):
        moved, _ = layer(x)
    unit = torch.finfo(dtype).eps * usual.double().abs()
    steps = (moved.double() - usual.double()).abs() / unit
    assert float(steps.max()) <= 1.0
    assert 0.2 < float((steps > 0).float().mean()) < 0.9
    assert torch.equal(layer(x)[0], usual)
