"""Another model's weights in the parameters for a while."""

import pytest
import torch
from torch import Tensor, nn

from rlmath.actor.exchange import swap_parameters


def made(kind, values):
    torch.manual_seed(0)
    # One buffer for all, as Megatron's DDP has it.
    buffer = torch.randn(60).to(kind)
    parameters = [nn.Parameter(buffer[20 * i : 20 * i + 20]) for i in range(3)]
    return parameters, [torch.randn(20).to(values) for _ in range(3)]


def copies(tensors):
    return [t.detach().clone() for t in tensors]


def same(one, other):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_both_come_back_bit_by_bit(kind, values, fails):
    parameters, others = made(kind, values)
    own, reference, places = copies(parameters), copies(others), [p.data_ptr() for p in parameters]
    for _ in range(2):
        try:
            with swap_parameters(parameters, others):
                assert same([p.detach() for p in parameters], [r.to(kind) for r in reference])
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            assert fails
        assert same([p.detach() for p in parameters], own) and same(others, reference)
    assert [p.data_ptr() for p in parameters] == places


@pytest.mark.parametrize("failing", range(3))
def test_a_failure_on_the_way_in_undoes_what_was_done(failing, monkeypatch):
    parameters, others = made(torch.float32, torch.float32)
    own, reference = copies(parameters), copies(others)
    copy, calls = Tensor.copy_, iter(range(100))

    def fails_once(self, source):
        if next(calls) == failing:
            copy(self[:7], source[:7])  # Half written.
            raise MemoryError
        return copy(self, source)

    monkeypatch.setattr(Tensor, "copy_", fails_once)
    with pytest.raises(MemoryError), swap_parameters(parameters, others):
        raise AssertionError("not reached")
    assert same([p.detach() for p in parameters], own) and same(others, reference)


def test_one_tensor_is_all_that_is_held_in_addition():
    """Of each pair only one copy is left, here and on the device, while the model runs."""
    parameters, others = made(torch.bfloat16, torch.bfloat16)
    own = copies(parameters)
    with swap_parameters(parameters, others):
        # What the list held is what the parameters hold; the list has the parameters' own.
        assert same(others, own)
