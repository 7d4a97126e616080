"""Storages leave the device and come back. With Megatron: tests/distributed/test_offload.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlmath.actor.offload import PARTS, DeviceState
from rlmath.device import CPU


def shards_as_megatron_has_them():
    """Two bfloat16 parameters that are views of one buffer, gradients of one, and Adam on float32
    copies of halves of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).bfloat16()
    weights, gradients = torch.randn(20).bfloat16(), torch.zeros(20)
    for parameter, (start, end) in zip(module.parameters(), ((0, 12), (12, 20)), strict=True):
        parameter.data = weights[start:end].view(parameter.shape)
        parameter.main_grad = gradients[start:end].view(parameter.shape)
    main = [nn.Parameter(weights[:10].float()), nn.Parameter(weights[12:16].float())]
    adam = torch.optim.AdamW(main, lr=0.1)
    for one in main:
        one.grad = torch.randn_like(one)
    adam.step()
    adam.zero_grad()
    buffer = SimpleNamespace(grad_data=gradients)
    model = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
    tensors = {"weights": weights, "first": module[0].weight, "gradients": gradients}
    tensors |= {f"main {i}": one.detach() for i, one in enumerate(main)}
    tensors |= {
        f"{key} {i}": adam.state[one][key]
        for i, one in enumerate(main)
        for key in ("exp_avg", "exp_avg_sq")
    }
    return DeviceState(module, [model], SimpleNamespace(optimizer=adam), CPU), tensors


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_everything_comes_back_bit_by_bit_in_the_same_storages():
    state, tensors = shards_as_megatron_has_them()
    before, held = copies(tensors), state.device_bytes()
    assert held == 20 * 2 + 20 * 4 + 3 * 4 * (10 + 4)
    for _ in range(2):
        state.release(*PARTS)
        assert state.device_bytes() == 0
        assert all(one.untyped_storage().nbytes() == 0 for one in tensors.values())
        # Each storage begins at a multiple of 256 bytes; gradients are zero and have no copy.
        assert state.host_bytes() == 256 + 256 * 6
        state.load(*PARTS)
        assert state.device_bytes() == held
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), name
    tensors["weights"][0] = 7
    assert tensors["first"][0, 0] == 7, "a parameter is a view of Megatron's buffer again"


def test_a_part_goes_alone_and_may_go_twice():
    state, tensors = shards_as_megatron_has_them()
    state.release("optimizer", "gradients")
    state.release("optimizer")
    assert state.device_bytes() == 20 * 2
    assert state.is_out("optimizer") and not state.is_out("parameters")
    assert tensors["main 0"].untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        tensors["main 0"][2:4]


def test_values_are_read_from_host_memory_while_they_are_out():
    state, tensors = shards_as_megatron_has_them()
    before = copies(tensors)
    assert state.read(tensors["first"]) is tensors["first"]
    state.release(*PARTS)
    assert torch.equal(state.read(tensors["first"]), before["first"])
    state.load("parameters")
    with state.optimizer_readable():
        assert torch.equal(tensors["exp_avg 1"], before["exp_avg 1"])
        tensors["exp_avg 1"].zero_()
    assert tensors["exp_avg 1"].untyped_storage().nbytes() == 0
    state.load(*PARTS)
    assert not tensors["exp_avg 1"].any(), "what is written there stays"
    assert torch.equal(tensors["main 0"], before["main 0"])


def test_a_tensor_is_found_without_looking_at_the_others():
    """An MoE's rank has tens of thousands: a checkpoint of 5,400 took 2 s only to look for them."""
    state, tensors = shards_as_megatron_has_them()
    before = copies(tensors)
    state.release("optimizer")

    class Unsearched(list[Any]):
        def __iter__(self):
            raise AssertionError("it looks at all")

    state._released["optimizer"] = Unsearched(state._released["optimizer"])
    assert torch.equal(state.read(tensors["exp_avg 1"]), before["exp_avg 1"])
    assert state.values(tensors["first"]) is None


def test_a_float32_models_main_parameters_are_its_parameters():
    module = nn.Linear(2, 3)
    adam = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = DeviceState(module, [], SimpleNamespace(optimizer=adam), CPU)
    state.release("optimizer")
    assert state.device_bytes() == 4 * 9
    state.release("parameters")
    assert state.device_bytes() == 0
    module.register_buffer("leak", torch.zeros(5))
    assert state.device_bytes() == 20


def test_nothing_of_an_untrained_model_is_gradient_or_optimizer():
    module = nn.Linear(2, 3)
    state = DeviceState(module, [], None, CPU)
    state.release(*PARTS)
    state.load(*PARTS)
    assert state.device_bytes() == 4 * 9
