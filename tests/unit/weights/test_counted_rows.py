"""The elements that a rank counts of a tensor are rows, of which the first and last may be cut."""

import functools
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.tensor_prints import rows_of


@given(
    st.sampled_from([(7,), (5, 3), (1, 8), (4, 2, 3)]),
    st.lists(st.integers(0, 24), max_size=3),
)
def test_parts_add_up_to_the_whole(shape, cuts):
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    size = values.numel()
    places = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [part for start, end in pairwise(places) for part in rows_of(values, start, end)]
    found = functools.reduce(add, (fingerprint(block, row) for row, block in parts))
    assert found == fingerprint(values)
    # Whole rows are no copies.
    whole = [block for _, block in parts if block.data_ptr() and len(block) > 1]
    assert all(block._base is not None for block in whole)


def test_nothing_is_nothing():
    assert list(rows_of(torch.ones(3, 2), 4, 4)) == []
