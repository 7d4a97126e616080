"""Passes in another precision: FP8 products and caches, Transformer Engine, rounding noise."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmath.actor.fp8 import copies_of_weights, fp8_settings, without_fp8
from rlmath.actor.lora import Adapter, attach_adapter
from rlmath.actor.quantized_products import MATRICES, quantized_cache, quantized_products
from rlmath.actor.rounding_noise import rounded_modules, rounding_noise
from rlmath.device import fp8 as device
from rlmath.errors import UserError
from rlmath.model.families import Rule
from rlmath.model.fp8 import DTYPE, LARGEST, NOTHING, round_cached, round_values
from rlmath.model.fp8_training import Fp8Training
from rlmath.model.lora import Lora
from rlmath.weights.adapters import AdapterLayout
from rlmath.weights.pieces import LocalTensor


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.output_layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.output_layer(self.linear_fc2(self.linear_fc1(x)))


def test_matrices_of_layers_multiply_in_fp8_and_weights_come_back():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(3, 8)
    weights = {name: (one.data_ptr(), one.clone()) for name, one in layer.named_parameters()}
    usual = layer(x)
    with torch.no_grad(), quantized_products(layer):
        found = layer(x)
    for one in (layer.linear_fc1, layer.linear_fc2):
        x = nn.functional.linear(round_values(x), round_values(one.weight.data), one.bias)
    assert torch.equal(found, layer.output_layer(x)) and not torch.equal(found, usual)
    with torch.no_grad(), quantized_products(layer), pytest.raises(RuntimeError):
        layer(torch.randn(3, 7))
    for name, parameter in layer.named_parameters():
        place, values = weights[name]
        assert parameter.data_ptr() == place and torch.equal(parameter, values)
    assert not layer.linear_fc1._forward_pre_hooks and not layer.linear_fc1._forward_hooks


class Matrix(nn.Linear):
    """As Megatron's give their output and a bias."""

    def forward(self, x):
        return super().forward(x), None

    def sharded_state_dict(self):
        return {}


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_proj = Matrix(8, 16).bfloat16()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_adapter_is_rounded_with_its_matrix_as_engines_get_it(enabled):
    torch.manual_seed(0)
    stage, x = Stage(), torch.randn(3, 8).bfloat16()
    parts = ("x.o_proj.weight",)
    shapes = (LocalTensor((2, 8), ()), LocalTensor((16, 2), ()))
    layout = AdapterLayout(parts, (((0, 16),),), Rule.row, *shapes)
    adapter = Adapter(layout, Lora(2, 3.0, ("o_proj",)), torch.empty(0).bfloat16(), False)
    torch.nn.init.normal_(adapter.a)
    torch.nn.init.normal_(adapter.b)
    adapter.enabled = enabled
    matrix = stage.linear_proj
    attach_adapter(matrix, adapter)
    with torch.no_grad():
        product = 1.5 * adapter.b.float() @ adapter.a.float()
    weight = matrix.weight.data
    if enabled:
        weight = (weight.float() + product).bfloat16()
    expected = nn.functional.linear(round_values(x), round_values(weight), matrix.bias)
    with torch.no_grad(), quantized_products(stage):
        found, _ = matrix(x)
    assert adapter.enabled is enabled
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_names_are_megatrons():
    assert MATRICES == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Attention(nn.Module):
    def forward(self, query, key, value, mask, scale=1.0):
        return scale * (query @ key.t()).softmax(-1) @ value


class CachedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.core_attention = Attention()
        self.other = Attention()

    def forward(self, query, key, value):
        return tuple(
            one(query, key, value, None, scale=0.5) for one in (self.core_attention, self.other)
        )


def test_attention_takes_keys_and_values_after_fp8_and_is_itself_again():
    torch.manual_seed(0)
    layer, (query, key, value) = CachedLayer(), torch.randn(3, 5, 8)
    usual, other = layer(query, key, value)
    with torch.no_grad(), quantized_cache(layer):
        found, untouched = layer(query, key, value)
    expected = layer.core_attention(query, round_cached(key), round_cached(value), None, scale=0.5)
    assert torch.equal(found, expected) and not torch.equal(found, usual)
    assert torch.equal(untouched, other)
    assert torch.equal(layer(query, key, value)[0], usual)


def test_on_a_cpu_bits_are_cut_off_as_vllms_kernels_do():
    """Every number that FP8 has stays; what lies between two becomes the one nearer to 0."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
    numbers = numbers[numbers.isfinite()].sort().values
    assert torch.equal(round_cached(numbers), numbers)
    above = numbers[numbers >= 0].unique()
    between = torch.cat(
        [(above[1:] - above[:-1]) * part + above[:-1] for part in (0.01, 0.5, 0.99)]
    )
    lower = above[:-1].repeat(3)
    assert torch.equal(round_cached(between), lower) and torch.equal(round_cached(-between), -lower)
    far = torch.tensor([448.5, 1e6, -1e6])
    assert torch.equal(round_cached(far), torch.tensor([LARGEST, LARGEST, -LARGEST]))
    assert round_cached(between.bfloat16()).dtype == torch.bfloat16


BLOCKWISE = Fp8Training("hybrid", "blockwise")


class TeLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self._fp8_workspaces: dict[str, int] = {}


def stage():
    shared, copied = (SimpleNamespace(fp8="hybrid") for _ in range(2))
    made = nn.Sequential(TeLayer(shared), nn.Linear(2, 2), TeLayer(shared), TeLayer(copied))
    made.config = shared
    return made


def test_copies_live_for_one_run_also_if_it_fails():
    made = stage()
    made[0]._fp8_workspaces["weight"] = 1
    with pytest.raises(ZeroDivisionError), copies_of_weights([made]):
        assert not made[0]._fp8_workspaces, "an older one is not used"
        made[0]._fp8_workspaces["weight"] = 1
        1 / 0  # noqa: B018
    assert not made[0]._fp8_workspaces


def test_without_fp8_reaches_every_configuration_and_comes_back():
    made = stage()
    with pytest.raises(ZeroDivisionError), without_fp8(made):
        assert all(one.config.fp8 is None for one in made if isinstance(one, TeLayer))
        1 / 0  # noqa: B018
    assert all(one.config.fp8 == "hybrid" for one in made if isinstance(one, TeLayer))


@pytest.mark.parametrize(("name", "expected"), [("policy", "hybrid"), ("noise", None)])
def test_the_gates_noise_is_of_a_pass_without_fp8(name, expected):
    """The distance to an engine, which computes in the model's type."""
    from rlmath.actor.passes import forward_passes
    from rlmath.actor.policy import MegatronActor

    made, seen = stage(), []
    actor = SimpleNamespace(
        settings=SimpleNamespace(model=SimpleNamespace(fp8=BLOCKWISE), engines_in_fp8=NOTHING),
        module=made,
        routing=None,
        is_last_stage=False,
        load_parameters=lambda: None,
        micro_batches=lambda _: [],
        forward=lambda *_: seen.append({one.config.fp8 for one in made if hasattr(one, "config")}),
        _of_log_probs=lambda _: None,
    )
    shard = SimpleNamespace(forward_share=lambda: None)
    actor.passes = forward_passes(actor)
    MegatronActor.shard_log_probs(actor, shard, name, seed=1)
    assert seen == [{expected}]
    assert all(one.config.fp8 == "hybrid" for one in made if isinstance(one, TeLayer))


@pytest.mark.parametrize(
    ("fp8", "experts", "name", "expected"),
    [
        (None, 0, "old", "forward"),
        (BLOCKWISE, 0, "old", "update"),
        (None, 8, "old", "update"),
        (BLOCKWISE, 8, "reference", "forward"),
    ],
)
def test_scales_and_routes_of_the_old_log_probs_are_those_of_the_update(
    fp8, experts, name, expected
):
    """Both depend on the sequences that are packed together."""
    from rlmath.actor.policy import MegatronActor

    taken = []
    actor = SimpleNamespace(
        settings=SimpleNamespace(model=SimpleNamespace(fp8=fp8)),
        spec=SimpleNamespace(experts=experts),
        passes={name: []},
        is_last_stage=False,
        load_parameters=lambda: None,
        micro_batches=taken.append,
        forward=lambda *_: None,
        _of_log_probs=lambda _: None,
    )
    shard = SimpleNamespace(forward_share=lambda: "forward", whole=lambda: "update")
    MegatronActor.shard_log_probs(actor, shard, name)
    assert taken == [expected]


def test_settings_of_megatron():
    assert fp8_settings(None, on_te=False) == {}
    assert fp8_settings(BLOCKWISE, on_te=True) == {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    with pytest.raises(UserError, match=r"actor\.fp8=hybrid: needs Transformer Engine"):
        fp8_settings(BLOCKWISE, on_te=False)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "part"),
    [
        ("blockwise", (8, 0), "13.0", "this one has 8.0"),
        ("blockwise", (9, 0), "12.8", "from CUDA 12.9, and torch is built for 12.8"),
        ("tensorwise", (9, 0), "12.8", None),
        ("blockwise", (9, 0), "13.0", None),
        ("mxfp8", (9, 0), "13.0", "use blockwise"),
    ],
)
def test_a_rank_refuses_its_gpu(monkeypatch, recipe, capability, cuda, part):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    fp8 = Fp8Training("e4m3", recipe)
    if part is None:
        device.require_fp8(fp8)
        return
    with pytest.raises(UserError, match=part):
        device.require_fp8(fp8)


class RowParallelLinear(nn.Linear):
    """Megatron's give their bias besides."""

    def forward(self, x):
        return super().forward(x), None


class RotaryEmbedding(nn.Identity):
    pass


class LanguageModelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(8, 16)


def test_the_innermost_modules_count_once_and_angles_never():
    model = nn.ModuleList([LanguageModelEmbedding(), RotaryEmbedding(), nn.RMSNorm(16), nn.SiLU()])
    assert [type(one).__name__ for one in rounded_modules(model)] == ["Embedding", "RMSNorm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_moves_by_at_most_one_unit_in_the_last_place(dtype):
    layer = RowParallelLinear(32, 64, dtype=dtype)
    x = torch.randn(50, 32, dtype=dtype)
    usual, _ = layer(x)
    with rounding_noise(layer, seed=1):
        moved, _ = layer(x)
    unit = torch.finfo(dtype).eps * usual.double().abs()
    steps = (moved.double() - usual.double()).abs() / unit
    assert float(steps.max()) <= 1.0
    assert 0.2 < float((steps > 0).float().mean()) < 0.9
    assert torch.equal(layer(x)[0], usual)
