"""Storages leave the device and come back, with copies begun ahead, and make room for another
model's weights for a while. With Megatron: tests/distributed/test_offload.py."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from rlmath.actor.exchange import swap_parameters
from rlmath.actor.lora import Adapter
from rlmath.actor.model_base import RankModel
from rlmath.actor.offload import PARTS, DeviceState
from rlmath.device import CPU, Platform
from rlmath.model.families import Rule
from rlmath.model.lora import Lora
from rlmath.weights.adapters import AdapterLayout
from rlmath.weights.pieces import LocalTensor
from tests.contracts.fake_cuda import FakeCuda, Races


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


def test_released_state_is_restored_bit_equal_in_its_storages():
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


def test_parts_are_offloaded_alone_and_repeatedly():
    state, tensors = shards_as_megatron_has_them()
    state.release("optimizer", "gradients")
    state.release("optimizer")
    assert state.device_bytes() == 20 * 2
    assert "optimizer" in state._released and "parameters" not in state._released
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


def test_untrained_model_has_no_gradients_or_optimizer_state():
    module = nn.Linear(2, 3)
    state = DeviceState(module, [], None, CPU)
    state.release(*PARTS)
    state.load(*PARTS)
    assert state.device_bytes() == 4 * 9


def state_of(monkeypatch, platform):
    """Optimizer state of a module of two parameters, with two moments."""
    module = torch.nn.Linear(3, 5)
    moments = [torch.rand(7), torch.rand(2, 3)]
    monkeypatch.setattr(DeviceState, "_optimizer_tensors", lambda _: moments)
    return DeviceState(module, [], object(), platform), module, moments


def test_pending_copy_is_what_is_offloaded(monkeypatch):
    state, module, moments = state_of(monkeypatch, CPU)
    weight, moment = module.weight.detach().clone(), moments[0].clone()
    state.begin_copy("parameters", "optimizer")
    assert "parameters" not in state._released and state.device_bytes() > 0
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
def test_changes_after_the_host_copy_are_kept(monkeypatch, change):
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
def test_copies_finish_before_the_cache_is_emptied(offload, wanted):
    """CUDA frees memory when all that the device does is done, copies too."""
    events = []
    state = SimpleNamespace(
        release=lambda part: events.append(f"free {part}"),
        begin_copy=lambda part: events.append(f"copy {part}"),
    )
    model = SimpleNamespace(settings=SimpleNamespace(offload=offload), device_state=state)
    RankModel.begin_release(model, lambda: events.append("empty cache"))
    assert events == wanted


def make_pairs(kind, values):
    torch.manual_seed(0)
    # One buffer for all, as Megatron's DDP has it.
    buffer = torch.randn(60).to(kind)
    parameters = [nn.Parameter(buffer[20 * i : 20 * i + 20]) for i in range(3)]
    return parameters, [torch.randn(20).to(values) for _ in range(3)]


def copies_of(tensors):
    return [t.detach().clone() for t in tensors]


def same(one, other):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_swapped_parameters_are_restored_bit_equal(kind, values, fails):
    parameters, others = make_pairs(kind, values)
    own, reference, places = (
        copies_of(parameters),
        copies_of(others),
        [p.data_ptr() for p in parameters],
    )
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
    parameters, others = make_pairs(torch.float32, torch.float32)
    own, reference = copies_of(parameters), copies_of(others)
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
    """One copy of each pair is left, here and on the device, while the model runs."""
    parameters, others = make_pairs(torch.bfloat16, torch.bfloat16)
    own = copies_of(parameters)
    with swap_parameters(parameters, others):
        # The parameters hold what the list held; the list has the parameters' own.
        assert same(others, own)


RANK, ROWS, COLUMNS = 4, 24, 16
LORA = Lora(RANK, 3.0, ("q_proj", "v_proj"))
# Rows 0 to 7 and 12 to 15 belong to the first matrix, 16 to 19 to the second, the others to none.
RUNS = (((0, 8), (12, 4)), ((16, 4),))


def adapter(rule, dtype):
    by_columns = rule is Rule.row
    parts = ("x.q_proj.weight", "x.v_proj.weight")[: 1 if by_columns else 2]
    layout = AdapterLayout(
        parts,
        (((0, ROWS),),) if by_columns else RUNS,
        rule,
        LocalTensor((len(parts) * RANK, COLUMNS), ()),
        LocalTensor((ROWS, RANK), ()),
    )
    made = Adapter(layout, LORA, torch.empty(0, dtype=dtype), sequence_parallel=False)
    torch.manual_seed(0)
    with torch.no_grad():
        made.a.normal_()
        made.b.normal_()
    return made


def expected_product(made, weight):
    """Row by row in float64."""
    whole = weight.double()
    for place, runs in enumerate(made.layout.rows):
        a = made.a[place * RANK : (place + 1) * RANK].double()
        for first, length in runs:
            for row in range(first, first + length):
                whole[row] += 0.75 * made.b[row].double() @ a
    return whole.detach()


@pytest.mark.parametrize("rule", [Rule.qkv, Rule.row], ids=str)
@pytest.mark.parametrize("elements", [1, 3 * COLUMNS, 1 << 24])
def test_rows_and_columns_are_those_of_the_whole(rule, elements):
    made, weight = adapter(rule, torch.float32), torch.randn(ROWS, COLUMNS)
    whole = expected_product(made, weight)
    with mock.patch("rlmath.actor.lora.MERGED_ELEMENTS", elements):
        for dim, start, length in ((0, 0, ROWS), (0, 5, 13), (0, 15, 2), (1, 0, 16), (1, 3, 7)):
            part = weight.narrow(dim, start, length)
            merged = made.merge(part, made.a, made.b, dim, start)
            same = whole.narrow(dim, start, length).float()
            torch.testing.assert_close(merged, same)
    assert torch.equal(whole[8:12], weight[8:12].double()) == (rule is Rule.qkv)


def test_the_sum_is_rounded_once():
    """A product rounded to bfloat16 before it is added, or a sum in bfloat16, differs from it."""
    made, weight = adapter(Rule.row, torch.bfloat16), torch.randn(ROWS, COLUMNS).bfloat16()
    merged = made.merge(weight, made.a, made.b, 0, 0)
    assert merged.dtype == torch.bfloat16
    once = (weight.float() + 0.75 * (made.b.float() @ made.a.float())).bfloat16()
    assert torch.equal(merged, once.detach())
    twice = weight + 0.75 * (made.b @ made.a)
    assert not torch.equal(merged, twice)


def test_untrained_rows_have_no_gradient_and_change_nothing():
    made = adapter(Rule.qkv, torch.float64)
    wide = made._wide(made.b)
    wide.square().sum().backward()
    unused = torch.ones(ROWS, dtype=torch.bool)
    for runs in RUNS:
        for first, length in runs:
            unused[first : first + length] = False
    assert not made.b.grad[unused].any() and made.b.grad[~unused].all()
    assert not wide[unused].any()
