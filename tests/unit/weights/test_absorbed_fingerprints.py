"""Latent attention in engines: what decodes is compared as well as what reads prompts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmath.weights.fingerprint import fingerprint
from rlmath.weights.slices import fingerprint_in
from rlmath.weights.transports import engine_fingerprints
from rlmath.weights.transports.engine_parts import Part

HEADS, CONTENT, VALUE, RANK = 2, 3, 5, 4
START = 16  # The second of two tensor ranks.
NAME = "model.layers.1.self_attn.kv_b_proj.weight"


class Attention(nn.Module):
    """vLLM's halves of ``kv_b_proj``."""

    def __init__(self, weight):
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (CONTENT + VALUE), bias=False)
        self.kv_b_proj.weight.data = weight.clone()
        content, value = weight.view(HEADS, -1, RANK).split([CONTENT, VALUE], 1)
        self.W_UK_T = nn.Parameter(content.clone())
        self.W_UV = nn.Parameter(value.transpose(1, 2).clone())


@pytest.mark.parametrize("half", [None, "W_UK_T", "W_UV"])
def test_a_half_that_is_stale_is_named(monkeypatch, half):
    weight = torch.randn(HEADS * (CONTENT + VALUE), RANK)
    attention = Attention(weight)

    def parts(module):
        linear = module.kv_b_proj
        return [Part("kv_b_proj.weight", linear, "weight", 0, 0, START, len(weight))]

    monkeypatch.setattr(engine_fingerprints, "parts_of", parts)
    whole = fingerprint(weight, START)
    held = {NAME: whole}
    if half is not None:
        getattr(attention, half).data[1, 2, 3] += 1.0
    model = SimpleNamespace(
        named_modules=lambda: [("model.layers.1.self_attn.mla_attn.mla_attn", attention)]
    )
    engine_fingerprints._prefer_absorbed(model, held)
    assert (held[NAME] == whole) is (half is None)
    # The fault is in column 3, or, of the values, in that of the latent 2.
    column = 3 if half == "W_UK_T" else 2
    for first in range(RANK):
        part = {NAME: ((first, first + 1),)}
        held = {NAME: fingerprint_in(part, NAME, weight, START, 0)}
        before = held[NAME]
        engine_fingerprints._prefer_absorbed(model, held, part)
        assert (held[NAME] == before) is (half is None or first != column)
    held = {}
    engine_fingerprints._prefer_absorbed(model, held, {"model.norm.weight": None})
    assert held == {}
