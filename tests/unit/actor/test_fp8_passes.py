"""``actor.fp8`` around Megatron's schedule: copies of weights, passes without it, GPUs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmath.actor.fp8 import copies_of_weights, fp8_settings, without_fp8
from rlmath.device import fp8 as device
from rlmath.errors import UserError
from rlmath.model.fp8 import NOTHING
from rlmath.model.fp8_training import Fp8Training

BLOCKWISE = Fp8Training("hybrid", "blockwise")


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self._fp8_workspaces: dict[str, int] = {}


def stage():
    shared, copied = (SimpleNamespace(fp8="hybrid") for _ in range(2))
    made = nn.Sequential(Layer(shared), nn.Linear(2, 2), Layer(shared), Layer(copied))
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
        assert all(one.config.fp8 is None for one in made if isinstance(one, Layer))
        1 / 0  # noqa: B018
    assert all(one.config.fp8 == "hybrid" for one in made if isinstance(one, Layer))


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
    shard = SimpleNamespace(whole=lambda: None)
    actor.passes = forward_passes(actor)
    MegatronActor.shard_log_probs(actor, shard, name, seed=1)
    assert seen == [{expected}]
    assert all(one.config.fp8 == "hybrid" for one in made if isinstance(one, Layer))


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
