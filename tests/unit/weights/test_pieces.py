"""The rules against Megatron's layouts written out by hand, for every way to share a model."""

from dataclasses import replace

import pytest
import torch

from rlmath.errors import ModelError, WeightsError
from rlmath.model.families import FAMILIES, Rule, family_of
from rlmath.model.spec import padded_vocab_size
from rlmath.weights.pieces import hf_shapes, local_tensor, walk
from tests.unit.weights.shapes import ALL, LLAMA, QWEN2, QWEN3, QWEN3_MOE, random_weights


def shard(entry, spec, weights, tp_size, layer, expert):
    """Each rank's parameter by the pieces; what no piece fills is NaN."""
    padded = padded_vocab_size(spec.vocab, tp_size)
    result = []
    for rank in range(tp_size):
        local = local_tensor(entry, spec, rank, tp_size, padded, layer, expert)
        parameter = torch.full(local.shape, torch.nan)
        for p in local.pieces:
            source = weights[p.hf_name].narrow(p.dim, p.hf_start, p.length)
            parameter.narrow(p.dim, p.local_start, p.length).copy_(source)
        result.append(parameter)
    return result


def expected_shards(entry, spec, parts, tp_size):
    """Megatron's layout from its definition, with reshapes and chunks instead of intervals."""
    if entry.rule is Rule.replicated:
        return [parts[0]] * tp_size
    if entry.rule is Rule.column:
        return list(parts[0].chunk(tp_size, 0))
    if entry.rule is Rule.row:
        return list(parts[0].chunk(tp_size, 1))
    if entry.rule is Rule.gate_up:
        chunks = [part.chunk(tp_size, 0) for part in parts]
        return [torch.cat(of_rank) for of_rank in zip(*chunks, strict=True)]
    if entry.rule is Rule.vocabulary:
        rows = padded_vocab_size(spec.vocab, tp_size) - spec.vocab
        padding = torch.full((rows, spec.hidden), torch.nan)
        return list(torch.cat([parts[0], padding]).chunk(tp_size, 0))
    rest = parts[0].shape[1:]
    by_group = [part.reshape(spec.kv_heads, -1, spec.head_dim, *rest) for part in parts]
    fused = torch.cat(by_group, dim=1).reshape(-1, *rest)
    return list(fused.chunk(tp_size, 0))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_shards_are_megatrons_layout_and_merge_back(spec, tp_size):
    # TP 4 is more than the 2 key-value heads; 53 tokens divide over neither 2 nor 4.
    weights = random_weights(spec)
    merged = {name: torch.full_like(t, torch.nan) for name, t in weights.items()}
    for entry, layer, expert in walk(spec):
        shards = shard(entry, spec, weights, tp_size, layer, expert)
        parts = [weights[t.name.format(layer=layer, expert=expert)] for t in entry.hf]
        expected = expected_shards(entry, spec, parts, tp_size)
        for rank, (got, wanted) in enumerate(zip(shards, expected, strict=True)):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            local = local_tensor(
                entry, spec, rank, tp_size, padded_vocab_size(spec.vocab, tp_size), layer, expert
            )
            for p in local.pieces:
                part = got.narrow(p.dim, p.local_start, p.length)
                merged[p.hf_name].narrow(p.dim, p.hf_start, p.length).copy_(part)
    for name, tensor in weights.items():
        assert torch.equal(merged[name], tensor), name


def test_a_rank_can_hold_padding_alone():
    spec = replace(QWEN2, vocab=5)
    entry = next(e for e in family_of(spec.architecture).entries if e.rule is Rule.vocabulary)
    local = local_tensor(entry, spec, 3, 4, padded_vocab=8)
    assert local.shape == (2, spec.hidden)
    assert local.pieces == ()


@pytest.mark.parametrize(
    ("spec", "tp_size", "words"),
    [
        (replace(QWEN2, ffn=25), 2, "ffn of 25 does not divide over 2 ranks: 25 / 2 = 12.50"),
        (replace(QWEN2, heads=6, kv_heads=6), 4, "6 key-value heads over TP 4"),
        (replace(QWEN2, heads=2, kv_heads=2), 4, "query heads of 2 does not divide over 4"),
    ],
)
def test_what_cannot_be_shared_says_so(spec, tp_size, words):
    with pytest.raises(WeightsError, match=words):
        for entry, layer, _ in walk(spec):
            local_tensor(entry, spec, 0, tp_size, padded_vocab_size(spec.vocab, tp_size), layer)


def test_names_are_those_of_the_published_models():
    assert "model.layers.2.self_attn.q_proj.bias" in hf_shapes(QWEN2)
    assert "lm_head.weight" in hf_shapes(QWEN2)
    assert hf_shapes(QWEN3)["model.layers.0.self_attn.q_norm.weight"] == (6,)
    assert "lm_head.weight" not in hf_shapes(QWEN3)
    assert not any("bias" in name for name in hf_shapes(LLAMA))
    moe = hf_shapes(QWEN3_MOE)
    assert moe["model.layers.2.mlp.experts.3.up_proj.weight"] == (12, 32)
    assert moe["model.layers.0.mlp.gate.weight"] == (4, 32)
    assert moe["model.layers.1.mlp.gate_proj.weight"] == (24, 32)
    assert "model.layers.1.mlp.gate.weight" not in moe


def test_an_architecture_has_one_table():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    with pytest.raises(ModelError, match=r"architecture Gpt2 is not supported.*Qwen2ForC"):
        family_of("Gpt2")
