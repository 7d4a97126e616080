"""Slices of the weights: a round covers every element once, and slices' fingerprints add up."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.slices import COLUMNS, Rotation, columns_in, fingerprint_in
from rlmath.weights.transports import engine_fingerprints
from rlmath.weights.transports.engine_parts import Part

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


def test_what_one_product_reads_is_one_unit():
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
