"""Batch-invariant kernels are enabled with what they need, or not at all."""

import sys
from types import ModuleType

import pytest
import torch

from rlmath.actor.model import ModelSettings, transformer_config
from rlmath.device import CPU
from rlmath.device.batch_invariant import enable_batch_invariance
from rlmath.errors import UserError
from rlmath.model.parallel import Layout
from rlmath.model.precision import Precision
from rlmath.model.spec import model_spec
from rlmath.model.tiny import tiny_config

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"


class Flash:
    is_installed = v3_is_installed = False
    version_required, max_version = "2.1.1", "2.8.3"


@pytest.fixture
def switch_calls(monkeypatch):
    """Calls of Megatron's switch; its kernels are Triton's, which needs a GPU."""
    calls = []
    kernels, utils = ModuleType(KERNELS), ModuleType(UTILS)
    kernels.enable_batch_invariant_mode = lambda: calls.append(True)
    utils.FlashAttentionUtils = Flash
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    parts = UTILS.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, UTILS, utils)
    matmul, deterministic = torch.backends.cuda.matmul, torch.utils.deterministic
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        deterministic.fill_uninitialized_memory,
    )
    yield calls
    torch.use_deterministic_algorithms(False)
    matmul.allow_bf16_reduced_precision_reduction = before[0]
    deterministic.fill_uninitialized_memory = before[1]


def test_without_flash_attention_nothing_is_enabled(switch_calls):
    with pytest.raises(UserError, match=r"precision\.batch_invariant.*2\.1\.1 to 2\.8\.3"):
        enable_batch_invariance()
    assert not switch_calls and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("version", ["is_installed", "v3_is_installed"])
def test_kernels_and_a_deterministic_backward_pass(switch_calls, monkeypatch, version):
    monkeypatch.setattr(Flash, version, True)
    enable_batch_invariance()
    assert switch_calls == [True] and torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_megatrons_own_layers_are_refused():
    spec = model_spec(tiny_config())
    settings = ModelSettings(torch.bfloat16, precision=Precision(batch_invariant=True))
    with pytest.raises(UserError, match=r"precision\.batch_invariant"):
        transformer_config(spec, Layout(1, 1, 1), CPU, settings, 128)


def test_batch_invariance_settings_of_megatron():
    """Its mode, the one attention backend that it allows with it, and a repeatable backward."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    from rlmath.actor.model import invariance_settings

    told = invariance_settings(Precision(batch_invariant=True), on_te=True)
    assert invariance_settings(Precision(), on_te=True) == {}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **told)
    assert config.batch_invariant_mode and config.deterministic_mode
    assert config.attention_backend is AttnBackend.flash
