"""Probes of an update: shares of the gradient by micro-batch, and Adam's steps by torch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmath.actor.gradient_shares import GradientShares, Groups
from rlmath.actor.model_base import RankModel
from rlmath.actor.step_probe import FINDINGS, OTHER_SLOPE, StepFinding, StepProbe
from rlmath.config.optimizer import OptimizerConfig

COUNT = 3


class Layer(nn.Module):
    def __init__(self, number, more):
        super().__init__()
        self.layer_number = number + 1
        self.more = more
        self.linear = nn.Linear(12, 12, bias=False)
        self.norm = nn.Parameter(torch.ones(12))

    def forward(self, x):
        return self.more(x + torch.tanh(self.linear(x * self.norm)))


class Model(nn.Module):
    """Two layers, whose gradients go to ``main_grad`` as Megatron's DDP has it."""

    def __init__(self, more=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(0, nn.Identity()), Layer(1, more or nn.Identity())])
        self.accumulators = []
        for one in self.parameters():
            one.main_grad = torch.zeros_like(one)
            node = one.expand_as(one).grad_fn.next_functions[0][0]
            node.register_hook(self._adds(one))
            self.accumulators.append(node)

    @staticmethod
    def _adds(one):
        def hook(*unused):
            if one.grad is not None and not getattr(one, "grad_added_to_main_grad", False):
                one.main_grad.add_(one.grad)
            one.grad = None

        return hook

    def clear(self):
        for one in self.parameters():
            one.main_grad.zero_()


def batches(seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 12, generator=draw) for _ in range(COUNT)]


def run(model, shares, given):
    """A pass; the signal of each micro-batch."""
    model.clear()
    shares.begin()
    for one in given:
        x = one
        for layer in model.layers:
            x = layer(x)
        x.square().sum().backward()
    return torch.ones(len(given), dtype=torch.float64)


def judge(model, shares, signals):
    found = shares.sums()
    return found if found.kind else shares.nothing_given(shares.gradient_sizes(COUNT), signals)


def test_matrices_have_global_layers_and_healthy_passes_no_finding():
    model = Model()
    shares = GradientShares([model], Groups())
    names = [name for name, _ in shares.layers]
    assert names == ["layer 0: linear.weight", "layer 1: linear.weight"]
    for seed in range(3):
        assert judge(model, shares, run(model, shares, batches(seed))) == StepFinding()


class Experts(nn.Module):
    """Three experts, of which each half of a batch goes to one, and the third gets no token."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.local_experts = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))

    def forward(self, x):
        parts = [*x.split(3), x[:0]]
        experts = self.experts.local_experts
        return torch.cat([one(own) for one, own in zip(experts, parts, strict=True)])


def test_expert_without_tokens_is_no_fault_and_a_layer_of_them_without_gradient_is():
    model = Model(Experts())
    shares = GradientShares([model], Groups())
    assert judge(model, shares, run(model, shares, batches())) == StepFinding()
    experts = model.layers[1].more.experts.local_experts
    handles = [one.weight.register_hook(torch.zeros_like) for one in experts[:2]]
    found = judge(model, shares, run(model, shares, batches()))
    assert found.place.startswith("micro-batch 0, layer 1: more.experts.weight of all experts")
    for one in handles:
        one.remove()
    signals = run(model, shares, batches())
    experts[1].weight.main_grad.zero_()
    found = judge(model, shares, signals)
    assert "not the sum over micro-batches" in FINDINGS[int(found.kind)]
    assert found.place == "layer 1: more.experts.local_experts.1.weight"


def test_micro_batch_that_gives_a_layer_nothing_is_named():
    model = Model()
    shares = GradientShares([model], Groups())
    calls = iter(range(COUNT))
    handle = model.layers[1].linear.weight.register_hook(
        lambda gradient: gradient * (next(calls) != 1)
    )
    found = judge(model, shares, run(model, shares, batches()))
    assert "adds nothing" in FINDINGS[int(found.kind)]
    assert found.place == "micro-batch 1, layer 1: linear.weight"
    handle.remove()
    # One without a gradient, or with a tiny one, is not judged.
    zero = batches()
    zero[2] = torch.zeros_like(zero[2])
    signals = run(model, shares, zero)
    assert judge(model, shares, signals).kind
    signals[2] = 1e-6
    assert judge(model, shares, signals) == StepFinding()


def test_layer_that_no_backward_pass_reaches_is_named():
    model = Model()
    shares = GradientShares([model], Groups())
    forward = Layer.forward
    detached = lambda self, x: forward(self, x) if self.layer_number > 1 else x  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "forward", detached)
        found = judge(model, shares, run(model, shares, batches()))
    assert found.place.startswith("micro-batch 0, layer 0: linear.weight and 5 more")


@pytest.mark.parametrize("change", [torch.zero_, lambda one: one.mul_(2.0)])
def test_buffers_that_are_not_the_sum_are_named(change):
    model = Model()
    shares = GradientShares([model], Groups())
    signals = run(model, shares, batches())
    change(model.layers[1].linear.weight.main_grad)
    found = judge(model, shares, signals)
    assert "not the sum over micro-batches" in FINDINGS[int(found.kind)]
    assert found.place == "layer 1: linear.weight"


def test_buffers_cleared_between_micro_batches_are_named():
    model = Model()
    shares = GradientShares([model], Groups())
    model.layers[0].register_forward_hook(lambda *_: model.clear())
    found = judge(model, shares, run(model, shares, batches()))
    assert "not the sum over micro-batches" in FINDINGS[int(found.kind)]


def test_gradient_that_a_product_added_is_read_from_the_buffer():
    """As Transformer Engine's layers do, which leave a gradient that nobody reads."""
    model = Model()
    shares = GradientShares([model], Groups())
    weight = model.layers[1].linear.weight

    def add(gradient):
        weight.main_grad.add_(gradient)
        weight.grad_added_to_main_grad = True
        return torch.full_like(gradient, 7.0)

    handle = weight.register_hook(add)
    assert judge(model, shares, run(model, shares, batches())) == StepFinding()
    handle.remove()
    calls = iter(range(COUNT))

    def lose(gradient):
        return add(gradient * (next(calls) != 2))

    weight.register_hook(lose)
    found = judge(model, shares, run(model, shares, batches()))
    assert found.place == "micro-batch 2, layer 1: linear.weight"


def test_every_matrix_is_looked_at_in_turn(monkeypatch):
    for limit in ("MAX_TENSORS", "MAX_VECTORS"):
        monkeypatch.setattr(f"rlmath.actor.gradient_shares.{limit}", 1)
    model = Model()
    shares = GradientShares([model], Groups())
    seen = []
    for _ in range(3):
        run(model, shares, batches())
        seen.append(list(shares._given))
    # Norms as well.
    assert seen == [[1, 0], [3, 2], [1, 0]]


def test_micro_batch_computed_again_in_two_parts_is_compared():
    model = Model()
    shares = GradientShares([model], Groups())
    given = batches()

    def compare(lost):
        # The last rows of what goes back through the first layer are lost.
        def lose(gradient):
            return torch.cat([gradient[:-2], torch.zeros_like(gradient[-2:])])

        def forward(module, inputs, output):
            output.register_hook(lose)

        handle = model.layers[0].register_forward_hook(forward) if lost else None
        run(model, shares, given[1].split(3))
        shares.repeat()
        again = shares.totals()
        run(model, shares, given)
        if handle is not None:
            handle.remove()
        return shares.differs_from(again, 1)

    assert compare(lost=False) == StepFinding()
    found = compare(lost=True)
    assert "another gradient" in FINDINGS[int(found.kind)]
    assert found.place == "micro-batch 1, layer 0: linear.weight"


def test_a_slope_that_all_ranks_find_hides_no_finding_of_one(monkeypatch):
    slope, other = StepFinding(float(OTHER_SLOPE)), StepFinding(6.0, 3e-5, 1e-5)
    ranks = [[slope, slope, StepFinding()], [other, slope, other]]

    def gather(found, mine):
        found[:] = ranks

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    kinds = torch.tensor([[one.kind for one in mine] for mine in ranks])
    model = SimpleNamespace(all_gather=lambda mine: kinds)
    found = RankModel.worst_findings(model, ranks[0])
    assert found == ((1, other), (0, slope), (1, other))


SETTINGS = OptimizerConfig(lr=1e-3, clip_grad_norm=0.7)


def finding(fault=None, between=None, lr=1e-3):
    """Findings in the fourth of a few steps.

    Args:
        fault: In that step, after the probe has looked.
        between: Before it, after the third one.
    """
    torch.manual_seed(0)
    weights = [torch.randn(40, 30) * 0.02, torch.ones(30), torch.randn(3) * 1e-4]
    parameters = [torch.nn.Parameter(one) for one in weights]
    betas = (SETTINGS.adam_beta1, SETTINGS.adam_beta2)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
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


@torch.no_grad()
def change_weights(adam):
    for group in adam.param_groups:
        for one in group["params"]:
            one.copy_(one.bfloat16())


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
        (change_weights, "weight is not what the last step left"),
    ],
)
def test_step_probe_names_state_that_was_lost_between_steps(between, part):
    assert part in finding(between=between)


def test_cleared_step_probe_compares_nothing():
    parameter = torch.nn.Parameter(torch.randn(5))
    adam = torch.optim.AdamW([parameter], weight_decay=0.0)
    settings = dataclasses.replace(SETTINGS, adam_beta2=0.999, adam_eps=1e-8, weight_decay=0.01)
    probe = StepProbe(SimpleNamespace(optimizer=adam), settings)
    for _ in range(2):
        parameter.grad = torch.full((5,), 1e-3)
        probe.before()
        adam.step()
        assert not probe.after(1e-3, 0.0).kind
        adam.state.clear()
        probe.forget()
