"""Adam's steps by torch, right and with a fault each, through the probe's eyes."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.step_probe import FINDINGS, StepFinding, StepProbe
from rlmath.config.optimizer import OptimizerConfig

SETTINGS = OptimizerConfig(lr=1e-3, clip_grad_norm=0.7)
Fault = Callable[[torch.optim.AdamW], None]


def finding(fault=None, between=None, lr=1e-3):
    """What is found in the fourth of a few steps.

    Args:
        fault: In that step, after the probe has looked.
        between: Before it, after the third one.
    """
    torch.manual_seed(0)
    weights = [torch.randn(40, 30) * 0.02, torch.ones(30), torch.randn(3) * 1e-4]
    parameters = [torch.nn.Parameter(one) for one in weights]
    betas = (SETTINGS.adam_beta1, SETTINGS.adam_beta2)
    groups = [{"params": parameters[::2]}, {"params": parameters[1:2], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups, lr=lr, betas=betas, eps=SETTINGS.adam_eps, weight_decay=SETTINGS.weight_decay
    )
    probe = StepProbe(SimpleNamespace(optimizer=adam), SETTINGS)
    found = StepFinding()
    for step in range(4):
        for one in parameters:
            one.grad = torch.randn_like(one) * 10.0**-step
        norm = float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())
        if step == 3 and between is not None:
            between(adam)
        probe.before()
        if step == 3 and fault is not None:
            fault(adam)
        torch.nn.utils.clip_grad_norm_(parameters, SETTINGS.clip_grad_norm)
        adam.step()
        found = probe.after(lr, norm)
        assert step == 3 or not found.kind
    return FINDINGS[int(found.kind)]


def change_states(name, change):
    def fault(adam):
        for state in adam.state.values():
            state[name] = change(state[name])

    return fault


def change_groups(name, change):
    def fault(adam):
        for group in adam.param_groups:
            group[name] = change(group[name])

    return fault


@pytest.mark.parametrize("lr", [1e-3, 1e-6, 1e-8])
def test_step_probe_finds_nothing_in_healthy_steps(lr):
    assert finding(lr=lr) == ""


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (change_groups("lr", lambda lr: 3 * lr), "scheduled learning rate"),
        (change_groups("betas", lambda betas: (0.5, betas[1])), "first moment is not beta1"),
        (change_groups("betas", lambda betas: (betas[0], 0.999)), "second moment is not beta2"),
        (change_groups("weight_decay", lambda decay: decay + 1.0), "scheduled learning rate"),
        (change_states("exp_avg", torch.zeros_like), "first moment is not beta1"),
        (change_states("step", torch.zeros_like), "scheduled learning rate"),
    ],
)
def test_step_probe_names_a_fault_within_the_step(fault, part):
    assert part in finding(fault)


@pytest.mark.parametrize(
    ("between", "part"),
    [
        (change_states("exp_avg", torch.zeros_like), "first moment is not what"),
        (change_states("exp_avg_sq", lambda x: x * 2), "second moment is not what"),
        (change_states("step", torch.zeros_like), "step count is not what"),
    ],
)
def test_step_probe_names_state_that_was_lost_between_steps(between, part):
    assert part in finding(between=between)


def test_step_probe_compares_nothing_after_it_was_told_to_forget():
    parameter = torch.nn.Parameter(torch.randn(5))
    adam = torch.optim.AdamW([parameter])
    settings = dataclasses.replace(SETTINGS, adam_beta2=0.999, adam_eps=1e-8, weight_decay=0.01)
    probe = StepProbe(SimpleNamespace(optimizer=adam), settings)
    for _ in range(2):
        parameter.grad = torch.full((5,), 1e-3)
        probe.before()
        adam.step()
        assert not probe.after(1e-3, 0.0).kind
        adam.state.clear()
        probe.forget()
