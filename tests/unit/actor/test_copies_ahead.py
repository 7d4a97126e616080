"""Copies to the host that are begun before the device's memory is given up."""

from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.model_base import RankModel
from rlmath.actor.offload import DeviceState
from rlmath.device import CPU, Platform
from tests.contracts.fake_cuda import FakeCuda, Races


def state_of(monkeypatch, platform):
    """Of a module of two parameters, with two moments."""
    module = torch.nn.Linear(3, 5)
    moments = [torch.rand(7), torch.rand(2, 3)]
    monkeypatch.setattr(DeviceState, "_optimizer_tensors", lambda _: moments)
    return DeviceState(module, [], object(), platform), module, moments


def test_a_copy_that_was_begun_is_what_leaves(monkeypatch):
    state, module, moments = state_of(monkeypatch, CPU)
    weight, moment = module.weight.detach().clone(), moments[0].clone()
    state.begin_copy("parameters", "optimizer")
    assert not state.is_out("parameters") and state.device_bytes() > 0
    assert torch.equal(state.read(module.weight), weight), "read from the device"
    copies = []
    monkeypatch.setattr(DeviceState, "_copy", lambda *_: copies.append(1) or [])
    state.begin_copy("parameters")
    state.release("parameters", "optimizer")
    assert not copies and state.device_bytes() == 0, "nothing is copied twice"
    assert torch.equal(state.read(module.weight), weight)
    state.load("parameters", "optimizer")
    assert torch.equal(module.weight, weight) and torch.equal(moments[0], moment)


def change_weights(state, module, moments):
    """As an update does."""
    state.load("parameters", "optimizer")
    with torch.no_grad():
        module.weight.add_(1)
    moments[0].add_(1)


def change_optimizer(state, module, moments):
    """As a reference that clears Adam's moments does."""
    state.load("parameters")
    with torch.no_grad():
        module.weight.add_(1)
    with state.optimizer_readable():
        moments[0].add_(1)


@pytest.mark.parametrize("change", [change_weights, change_optimizer])
def test_what_changes_after_it_was_copied_is_not_lost(monkeypatch, change):
    state, module, moments = state_of(monkeypatch, CPU)
    expected = [module.weight.detach() + 1, moments[0] + 1]
    state.begin_copy("parameters", "optimizer")
    change(state, module, moments)
    state.release("parameters", "optimizer")
    state.load("parameters", "optimizer")
    assert torch.equal(module.weight, expected[0]) and torch.equal(moments[0], expected[1])


class Unordered(DeviceState):
    """Forgets that the copies come after what the caller has queued."""

    class _Stream:
        def __init__(self, inner):
            self.queue, self.wait = inner.queue, inner.wait

        def start(self): ...

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.__dict__["_stream"] = self._Stream(self._platform.side_stream())


class Hasty(DeviceState):
    """Forgets to wait for the copies."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.__dict__["_stream"] = stream = self._platform.side_stream()
        stream.wait = lambda: None


@pytest.mark.parametrize(
    ("kind", "is_right"), [(DeviceState, True), (Unordered, False), (Hasty, False)]
)
def test_copies_are_ordered_on_cudas_streams(monkeypatch, kind, is_right):
    """After the optimizer's step, and before anybody writes again, in two steps."""
    cuda = FakeCuda()
    cuda.install(monkeypatch, "cpu")
    platform = Platform("cuda", "nccl", "local")
    monkeypatch.setattr(
        Platform, "host_buffer", lambda _, size: torch.empty(size, dtype=torch.uint8)
    )
    _, module, moments = state_of(monkeypatch, platform)
    state = kind(module, [], object(), platform)
    # A storage that is resized to nothing and back would pass for the same memory.
    monkeypatch.setattr("rlmath.actor.offload.resize", lambda *_: None)
    with Races(cuda), torch.no_grad():
        for _ in range(2):
            state.load("parameters", "optimizer")
            for one in (*module.parameters(), *moments):
                one.add_(1)
            state.begin_copy("parameters", "optimizer")
            state.release("parameters", "optimizer")
    assert bool(cuda.races) is not is_right, cuda.races


@pytest.mark.parametrize(
    ("offload", "wanted"),
    [
        ("none", ["empty cache"]),
        ("optimizer", ["free gradients", "empty cache", "copy optimizer"]),
        ("all", ["free gradients", "empty cache", "copy optimizer", "copy parameters"]),
    ],
)
def test_no_copy_is_under_way_when_the_cache_is_emptied(offload, wanted):
    """CUDA frees memory when all that the device does is done, copies too."""
    events = []
    state = SimpleNamespace(
        release=lambda part: events.append(f"free {part}"),
        begin_copy=lambda part: events.append(f"copy {part}"),
    )
    model = SimpleNamespace(settings=SimpleNamespace(offload=offload), device_state=state)
    RankModel.begin_release(model, lambda: events.append("empty cache"))
    assert events == wanted
