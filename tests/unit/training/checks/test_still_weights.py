import torch

from rlmath.actor.frozen_weights import FrozenWeights
from rlmath.training.checks.still_weights import different_copies, find_drift, find_moved
from rlmath.weights.gather import WeightChanges


def getters(tensors):
    return [(name, lambda one=one: one) for name, one in tensors]


def test_frozen_weights_that_move_are_named_within_the_round():
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [(f"t{i}", torch.randn(100, 50).to(dtype)) for i in range(4)]
        looking = FrozenWeights(getters(tensors), mib_per_step=0.0)
        assert [looking.find_changed() for _ in range(5)] == [[]] * 5
        tensors[3][1][7, 3] *= 2
        found = [looking.find_changed() for _ in range(4)]
        assert sorted(found) == [[], [], [], ["t3"]]
    everything = FrozenWeights(getters(tensors))
    tensors[0][1].mul_(0.5)
    tensors[2][1].mul_(0.5)
    assert everything.find_changed() == ["t0", "t2"]
    assert FrozenWeights([]).find_changed() == []


def test_moved_weights_are_named_with_their_rank():
    assert find_moved([[], []]) == []
    (sentence,) = find_moved([[], ["a", "b", "c", "d"]])
    assert "a on rank 1, b on rank 1, c on rank 1 and 1 more" in sentence


def test_copies_that_differ_are_named():
    alike = WeightChanges({"a": 1, "b": 2}, None)
    assert different_copies([alike, alike]) == []
    (sentence,) = different_copies([alike, alike, WeightChanges({"a": 1, "b": 3}, None)])
    assert "rank 2 holds other weights than rank 0 after the update, in b" in sentence


def test_differing_copies_of_weights_are_named():
    alike = WeightChanges({"a": 1}, None)
    assert find_drift([alike, alike]) == []
    other = WeightChanges({"a": 1}, None, "ranks 0 and 1 should hold the same norm and do not")
    (sentence,) = find_drift([alike, other])
    assert sentence.startswith("ranks 0 and 1 should hold the same norm")
