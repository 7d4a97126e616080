"""Fingerprints of tensors: by definition, in slices, of absorbed, packed and quantized weights."""

from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlmath.engines.transports import engine_fingerprints
from rlmath.engines.transports.engine_fingerprints import _of_packed, _of_quantized
from rlmath.engines.transports.engine_parts import Part
from rlmath.errors import WeightsError
from rlmath.model.fp8 import quantize
from rlmath.weights.fingerprint import add, compare_fingerprints, fingerprint, fingerprints
from rlmath.weights.quantized_prints import is_quantized, quantized_fingerprints
from rlmath.weights.sequence_fingerprints import token_digest, token_digests
from rlmath.weights.slices import COLUMNS, Rotation, columns_in, fingerprint_in


def tensor(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def by_definition(x):
    """Python's integers instead of wrapped arithmetic."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).reshape(-1)

    def to_signed(n):
        return (n + 2**63) % 2**64 - 2**63

    def odd(place):
        w = to_signed((place + 1) * -7046029254386353131)
        w ^= w >> 29
        w = to_signed(w * -4658895280553007687)
        return (w ^ (w >> 32)) | 1

    width = max(1, bits.numel() // x.shape[0]) if x.ndim > 1 and x.shape[0] else 1
    total = 0
    for place, value in enumerate(bits.tolist()):
        row, column = divmod(place, width)
        total += value * odd(2**40 + row) * odd(column)
    return to_signed(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (7,), (5, 3), (2, 3, 4)])
def test_is_the_sum_that_it_says(shape, dtype):
    x = tensor(shape, dtype)
    assert fingerprint(x) == by_definition(x)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1), st.data())
def test_fingerprints_of_parts_add_up(rows, columns, dim, data):
    whole = tensor((rows, columns), torch.bfloat16)
    cut = data.draw(st.integers(0, whole.shape[dim]))
    corner = (cut, 0) if dim == 0 else (0, cut)
    parts = [
        fingerprint(whole.narrow(dim, 0, cut)),
        fingerprint(whole.narrow(dim, cut, whole.shape[dim] - cut), *corner),
    ]
    assert reduce(add, parts) == fingerprint(whole)


def test_fingerprint_detects_one_flipped_bit_and_swaps():
    x = tensor((64, 48), torch.bfloat16)
    original = fingerprint(x)
    for bit in range(16):
        flipped = x.clone()
        flipped.view(torch.int16)[10, 20] ^= torch.tensor(
            -(2**15) if bit == 15 else 1 << bit
        ).short()
        assert fingerprint(flipped) != original
    assert fingerprint(x.flip(0)) != original
    assert fingerprint(x[:48].T.contiguous()) != fingerprint(x[:48])
    assert fingerprint(x.roll(1, 1)) != original
    assert fingerprint(torch.cat([x[32:], x[:32]])) != original


def test_negative_and_subnormal_zeros_are_zero():
    x = tensor((3, 5))
    zeros = x.clone()
    zeros[1, 2] = 0.0
    for value in (-0.0, 1e-40, -1e-40):
        x[1, 2] = value
        assert fingerprint(x) == fingerprint(zeros)
    x[1, 2] = torch.finfo(torch.float32).tiny
    assert fingerprint(x) != fingerprint(zeros)


def test_a_difference_is_reported_by_name():
    sent = fingerprints([("k_proj", tensor((4, 4))), ("v_proj", tensor((4, 5)))])
    compare_fingerprints(sent, dict(sent), "engine 0")
    with pytest.raises(WeightsError, match=r"engine 0 holds other .* 1 of 2 .*: v_proj differs"):
        compare_fingerprints(sent, {**sent, "v_proj": sent["k_proj"]}, "engine 0")
    with pytest.raises(WeightsError, match="v_proj is missing"):
        compare_fingerprints(sent, {"k_proj": sent["k_proj"]}, "engine 0")
    with pytest.raises(WeightsError, match="other was never sent"):
        compare_fingerprints(sent, {**sent, "other": 1}, "engine 0")


def test_unreadable_fingerprints_are_left_out():
    compare_fingerprints({"a": 1, "b": 2}, {"a": 1, "b": None}, "engine 0")
    with pytest.raises(WeightsError, match=r"1 of 2 tensors: a differs"):
        compare_fingerprints({"a": 1, "b": 2}, {"a": 3, "b": None}, "engine 0")


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


def test_matrices_of_layers_are_quantized_and_nothing_else():
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        assert is_quantized(f"model.layers.0.{name}")
    for name in ("self_attn.q_proj.bias", "input_layernorm.weight", "mlp.gate.weight"):
        assert not is_quantized(f"model.layers.0.{name}")
    assert not is_quantized("model.embed_tokens.weight") and not is_quantized("lm_head.weight")


def worker(whole, dim, rank):
    """vLLM's layer of a tensor rank of two, quantized by the whole's rows."""
    values, scale = quantize(whole)
    size = whole.shape[dim] // 2
    mine = values.narrow(dim, rank * size, size)
    scale = scale.narrow(0, rank * size, size) if dim == 0 else scale
    parameters = {"weight": mine.t(), "weight_scale": scale}
    return SimpleNamespace(**{n: torch.nn.Parameter(p, False) for n, p in parameters.items()})


@pytest.mark.parametrize("dim", [0, 1])
def test_fingerprints_of_shards_add_up_and_detect_a_change(dim):
    torch.manual_seed(0)
    whole = torch.randn(8, 12)
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = quantized_fingerprints([(name, whole), ("norm.weight", torch.ones(3))])
    assert set(wanted) == {name, f"{name}_scale", "norm.weight"}

    def sums_of(layers):
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
    assert sums_of(layers) == (wanted[name], wanted[f"{name}_scale"])
    layers[1].weight.data.view(torch.uint8)[2, 1] ^= 1
    assert sums_of(layers)[0] != wanted[name] and sums_of(layers)[1] == wanted[f"{name}_scale"]
    other = SimpleNamespace(
        weight=torch.nn.Parameter(torch.zeros(3, 3)), weight_scale=torch.nn.Parameter(torch.ones(1))
    )
    assert _of_quantized(Part(name, other, "weight", 0, 0, 0, 3)) is None


SHAPES = {
    "embed.weight": (64, 40),
    "layers.0.norm.weight": (40,),
    "layers.0.q_proj.weight": (32, 40),
    "layers.0.q_proj.bias": (32,),
    "layers.0.k_proj.weight": (8, 40),
    "layers.0.o_proj.weight": (40, 32),
    "layers.0.experts.0.gate_proj.weight": (24, 40),
    "layers.0.experts.0.up_proj.weight": (24, 40),
    "layers.0.experts.0.down_proj.weight": (40, 24),
    "norm.weight": (40,),
}
EXPERTS = frozenset(name for name in SHAPES if "experts" in name)


def one_round(rotation, work):
    found = []
    while not found or not rotation.is_at_start:
        found.append(dict(rotation.pop(work)[0]))
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("work", [0.0, 4e5, 1e12])
def test_a_round_covers_every_element_once(packed, work):
    rotation = Rotation(SHAPES, packed=packed, whole=EXPERTS)
    orders = []
    for _ in range(2):
        slices = one_round(rotation, work)
        orders.append(slices)
        seen = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for part in slices:
            # Vectors alone may not change in an update.
            assert any(len(SHAPES[name]) == 2 for name in part)
            for name, windows in part.items():
                if windows is None:
                    seen[name] += 1
                for low, high in windows or ():
                    seen[name][:, low:high] += 1
        assert all(bool((counts == 1).all()) for counts in seen.values())
        assert len(slices) == (1 if work == 1e12 else len(slices))
    assert work == 1e12 or orders[0] != orders[1], "another order in each round"
    assert one_round(Rotation(SHAPES, packed=packed, whole=EXPERTS), work) == orders[0]


def test_weights_of_one_product_rotate_together():
    rotation = Rotation(SHAPES, packed=True, whole=EXPERTS)
    for part in one_round(rotation, 0.0):
        q, k = (part.get(f"layers.0.{name}_proj.weight") for name in "qk")
        assert q == k
        assert len(EXPERTS & part.keys()) in (0, 3)
        assert all(w is None or w[0][1] - w[0][0] <= COLUMNS for w in part.values())


def test_the_work_of_a_slice_is_what_was_asked_for():
    shapes = {f"layers.{i}.down_proj.weight": (64, 640) for i in range(8)}
    rotation = Rotation(shapes, packed=True)
    wanted = rotation.work / 10
    total = 0.0
    for _ in range(10):
        _, taken = rotation.pop(wanted)
        assert 0.9 * wanted < taken <= wanted
        total += taken
    assert 0.9 * rotation.work < total <= rotation.work


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_a_slice_add_up(dim):
    whole = torch.randn(12, 64)
    part = {"w": ((0, 16), (24, 40))}
    wanted = add(fingerprint(whole[:, :16]), fingerprint(whole[:, 24:40], 0, 24))
    assert fingerprint_in(part, "w", whole, 0, 0) == wanted
    found, size = 0, whole.shape[dim] // 2
    for rank in (0, 1):
        corner = (rank * size, 0) if dim == 0 else (0, rank * size)
        found = add(found, fingerprint_in(part, "w", whole.narrow(dim, rank * size, size), *corner))
    assert found == wanted
    assert columns_in(part, "other", 0, 64) == [] and columns_in(None, "w", 5, 7) == [(0, 7)]
    assert columns_in(part, "w", 32, 32) == [(0, 8)]


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_columns_of_a_slice_are_read_of_a_packed_matrix(dim):
    whole = torch.randn(8, 96)
    size = whole.shape[dim] // 2
    part = {"a.weight": ((0, 16), (40, 56)), "b.weight": ((40, 56),)}
    sums, read = [0, 0], 0
    for rank in (0, 1):
        held = whole.narrow(dim, rank * size, size)

        def product(inputs, *_, held=held):
            nonlocal read
            read += len(inputs)
            return inputs @ held.t()

        module = SimpleNamespace(
            cpu_linear=product, input_size=held.shape[1], weight=torch.empty(0)
        )
        rows = len(held) // 2 if dim == 0 else len(held)
        names = ("a.weight", "b.weight") if dim == 0 else ("a.weight",)
        parts = [
            Part(name, module, "weight", at * rows, dim, rank * (rows if dim == 0 else size), rows)
            for at, name in enumerate(names)
        ]
        for at, value in enumerate(engine_fingerprints._of_packed(parts, torch.float32, part)):
            sums[at] = add(sums[at], value)
    if dim == 0:
        a = torch.cat([whole[0:2], whole[4:6]])
        b = torch.cat([whole[2:4], whole[6:8]])
        assert sums == [
            fingerprint_in(part, "a.weight", a, 0, 0),
            fingerprint_in(part, "b.weight", b, 0, 0),
        ]
        assert read == 2 * 32, "columns that a and b share are read once"
    else:
        assert sums[0] == fingerprint_in(part, "a.weight", whole, 0, 0)
        assert read == 32


def digest(prompt, response):
    return token_digest(np.array(prompt, np.int32), np.array(response, np.int32))


def test_tokens_their_order_and_the_prompts_end_change_it():
    whole = digest([1, 2, 3], [4, 5])
    others = [
        *(digest([1, 2], [3, 4, 5]), digest([1, 2, 3, 4], [5]), digest([1, 2, 3], [5, 4])),
        *(digest([1, 2, 3], [4, 6]), digest([1, 2, 3], [4]), digest([1, 2, 3], [4, 5, 0])),
    ]
    assert len({whole, *others}) == 7
    assert whole == digest([1, 2, 3], [4, 5]) and -(2**63) <= whole < 2**63


def test_a_batch_has_those_of_its_sequences():
    tokens = torch.tensor([1, 2, 3, 4, 5, 9, 8, 7])
    found = token_digests(tokens, torch.tensor([3, 1, 0]), torch.tensor([5, 2, 1]))
    assert found.tolist() == [digest([1, 2, 3], [4, 5]), digest([9], [8]), digest([], [7])]
    # Slices of a larger array are not contiguous where they are strided.
    strided = np.arange(10, dtype=np.int32)[::2]
    assert token_digest(strided, strided) == digest([0, 2, 4, 6, 8], [0, 2, 4, 6, 8])
    none = torch.zeros(0, dtype=torch.int64)
    assert token_digests(none, none, none).tolist() == []
