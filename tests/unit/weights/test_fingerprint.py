"""Fingerprints see any change, and those of parts add up to that of the whole."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlmath.weights.fingerprint as fingerprint_module
from rlmath.errors import WeightsError
from rlmath.weights.fingerprint import add, compare_fingerprints, fingerprint, fingerprints


def tensor(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def by_definition(x):
    """Python's integers instead of wrapped arithmetic."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).reshape(-1)

    def signed(n):
        return (n + 2**63) % 2**64 - 2**63

    def odd(place):
        w = signed((place + 1) * -7046029254386353131)
        w ^= w >> 29
        w = signed(w * -4658895280553007687)
        return (w ^ (w >> 32)) | 1

    width = max(1, bits.numel() // x.shape[0]) if x.ndim > 1 and x.shape[0] else 1
    total = 0
    for place, value in enumerate(bits.tolist()):
        row, column = divmod(place, width)
        total += value * odd(2**40 + row) * odd(column)
    return signed(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (7,), (5, 3), (2, 3, 4)])
def test_is_the_sum_that_it_says(shape, dtype):
    x = tensor(shape, dtype)
    assert fingerprint(x) == by_definition(x)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1), st.data())
def test_parts_add_up(rows, columns, dim, data):
    whole = tensor((rows, columns), torch.bfloat16)
    cut = data.draw(st.integers(0, whole.shape[dim]))
    corner = (cut, 0) if dim == 0 else (0, cut)
    parts = [
        fingerprint(whole.narrow(dim, 0, cut)),
        fingerprint(whole.narrow(dim, cut, whole.shape[dim] - cut), *corner),
    ]
    assert reduce(add, parts) == fingerprint(whole)


def test_chunks_do_not_matter(monkeypatch):
    x = tensor((50, 7))
    expected = fingerprint(x)
    monkeypatch.setitem(fingerprint_module._CHUNK_ELEMENTS, "cpu", 20)
    assert fingerprint(x) == expected


def test_one_flipped_bit_and_swaps_are_seen():
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


def test_a_rectangle_adds_what_it_adds_to_the_whole():
    whole = tensor((6, 10))
    cells = [(slice(0, 4), slice(0, 3)), (slice(0, 4), slice(3, 10)), (slice(4, 6), slice(0, 10))]
    parts = [
        fingerprint(whole[rows, columns], rows.start, columns.start) for rows, columns in cells
    ]
    assert reduce(add, parts) == fingerprint(whole)


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


def test_what_cannot_be_read_is_left_out():
    compare_fingerprints({"a": 1, "b": 2}, {"a": 1, "b": None}, "engine 0")
    with pytest.raises(WeightsError, match=r"1 of 2 tensors: a differs"):
        compare_fingerprints({"a": 1, "b": 2}, {"a": 3, "b": None}, "engine 0")
