"""Checksums of an optimizer's state: what was not restored is named."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.checkpoint.manifest import BrokenCheckpoint
from rlmath.checkpoint.optimizer_prints import check_prints, optimizer_prints, save_prints


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
