"""Checksums of an optimizer's state: what was not restored is named."""

from types import SimpleNamespace

import pytest
import torch

import rlmath.checkpoint.optimizer_prints as prints
from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.optimizer_prints import (
    check_prints,
    checksum,
    optimizer_prints,
    save_prints,
)
from rlmath.checkpoint.optimizer_state import load_optimizer_state


def train():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(one) for one in (torch.randn(4, 3), torch.ones(2))]
    adam = torch.optim.AdamW(parameters)
    for one in adam.param_groups[0]["params"]:
        one.grad = torch.randn_like(one)
    adam.step()
    return adam, SimpleNamespace(optimizer=adam), SimpleNamespace(num_steps=1)


def test_optimizer_state_that_was_not_restored_is_named(tmp_path):
    adam, optimizer, scheduler = train()
    save_prints(tmp_path, 0, optimizer_prints(optimizer, scheduler))
    check_prints(tmp_path, 0, optimizer_prints(*train()[1:]), same_layout=True)
    next(iter(adam.state.values()))["exp_avg"].zero_()
    with pytest.raises(BrokenCheckpoint, match=r"exp_avg of tensor 0\.0\.0 \(4x3\) of 9 differ"):
        check_prints(tmp_path, 0, optimizer_prints(optimizer, scheduler), same_layout=True)
    # In another layout ranks have other parts.
    check_prints(tmp_path, 1, optimizer_prints(optimizer, scheduler), same_layout=False)
    scheduler.num_steps = 0
    with pytest.raises(BrokenCheckpoint, match="step of the learning-rate schedule of 1 differ"):
        check_prints(tmp_path, 1, optimizer_prints(optimizer, scheduler), same_layout=False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_checksum_has_a_part_in_64_bits_at_a_time(dtype, monkeypatch):
    """A teacher's engine has filled its GPU: an embedding as int64 does not fit beside it."""
    monkeypatch.setattr(prints, "_ELEMENTS_AT_ONCE", 2000)
    values = torch.randn(64, 1000).to(dtype)
    whole = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])
    for one, bits in ((values.t(), whole), (values[0, 0], whole[0, 0])):
        assert checksum(one) == int(bits.to(torch.int64).sum())
    with torch.profiler.profile(profile_memory=True) as found:
        checksum(values)
    sizes = [one.cpu_memory_usage for one in found.events()]
    assert 2000 * 8 <= max(sizes) < 2 * 2000 * 8


MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Loads its state as Transformer Engine 2.11 does: every moment gets another tensor,
    while the caller still holds the first ones (``FusedAdam.load_state_dict``)."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.1})
        for parameter in parameters:
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                state[name] = state[name].clone()


class DistributedOptimizer:
    """As much of Megatron's as a load touches."""

    def __init__(self, inner):
        self.optimizer = inner

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def load_state_dict(self, state):
        own = self.optimizer.state_dict()
        groups = [
            {**group, "params": before["params"]}
            for group, before in zip(
                state["optimizer"]["param_groups"], own["param_groups"], strict=True
            )
        ]
        self.optimizer.load_state_dict({"state": own["state"], "param_groups": groups})

    def load_parameter_state_from_fully_reshardable(self, tensors):
        (parameter,) = self.optimizer.param_groups[0]["params"]
        for name, values in tensors[0].items():
            kept = parameter if name == "param" else self.optimizer.state[parameter][name]
            kept.copy_(values)


def test_moments_are_loaded_into_the_tensors_that_they_are_in():
    """A second copy of both, 8 bytes a parameter, did not fit beside a 3B on one H100: its run
    could not be resumed."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    part = DistributedOptimizer(FusedAdam([parameter], lr=0.5))
    before = dict(part.optimizer.state[parameter])
    saved = {name: torch.full((4,), float(n)) for n, name in enumerate(("param", *MOMENTS), 1)}
    # Another run of the loop: its learning rate is not this one's.
    groups = [{"lr": 0.25, "weight_decay": 0.0, "step": 7}]
    load_optimizer_state(part, {"param_state": {0: saved}, "optimizer": {"param_groups": groups}})
    after = part.optimizer.state[parameter]
    assert all(after[name] is before[name] for name in MOMENTS)
    assert {name: float(after[name][0]) for name in MOMENTS} == {"exp_avg": 2, "exp_avg_sq": 3}
    assert float(parameter[0].detach()) == 1
    (group,) = part.param_groups
    assert (group["step"], group["lr"], group["weight_decay"]) == (7, 0.5, 0.1)
