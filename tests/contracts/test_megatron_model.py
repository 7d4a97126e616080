"""Megatron's model, checkpoints and learning rates, as far as a table of rows does not say it."""

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlmath.actor import parallel
from rlmath.actor.optimizer import build_scheduler
from rlmath.actor.rotary import keep_one_rotary_table
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.device import Platform
from rlmath.model.parallel import Layout
from rlmath.training.checks.optimizer_steps import scheduled_rate

CORE = "megatron.core"
KERNELS = f"{CORE}.transformer.custom_layers.batch_invariant_kernels"


def source(module):
    """Source of a module that imports only with CUDA or Transformer Engine."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def function(module, name):
    """The source of a function or method of such a module."""
    text = source(module)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    pytest.fail(f"{module} has no {name}")


@pytest.mark.parametrize(
    "layer", ["TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear"]
)
def test_the_extension_reads_the_fusion_flag_once(layer):
    """It hands the flag to Transformer Engine's constructor, whose attribute the forward pass
    reads: ``accumulate_into_main_grads`` sets that later, when Megatron's buffers are there."""
    text = function(f"{CORE}.extensions.transformer_engine", layer)
    assert text.count("gradient_accumulation_fusion") == 1
    assert "fuse_wgrad_accumulation=self.config.gradient_accumulation_fusion" in text


def test_batch_invariant_products_overwrite_where_they_should_add():
    """Reason not to fuse weight gradients with batch invariance. When Megatron reads ``accumulate``
    this fails, and ``accumulate_into_main_grads`` need make no exception."""
    text = function(KERNELS, "_te_general_gemm_patched") + function(
        KERNELS, "_extract_te_gemm_args"
    )
    assert "out.copy_(result)" in text and "accumulate" not in text


def test_batch_invariant_replacements_exist_in_megatron():
    """Products and means of torch, products and the norm module of Transformer Engine; neither
    grouped products (experts) nor the norm inside LayerNormLinear, which other names call."""
    text = source(KERNELS)
    for name in ("aten::mm", "aten::addmm", "aten::mean.dim"):
        assert f'.impl("{name}"' in text
    patch = function(KERNELS, "_te_patch_for_batch_invariant")
    assert "rms_cls.forward = _te_rmsnorm_forward_patched" in patch
    assert "te_linear_mod.general_gemm = _te_general_gemm_patched" in patch
    assert "grouped" not in patch and "apply_normalization" not in patch
    # Experts and context ranks are refused (rlmath/checks/precision.py) for as long as the
    # attention of one rank alone is told about batch invariance.
    attention = function(f"{CORE}.extensions.transformer_engine", "TEDotProductAttention")
    assert "num_splits is None and self.config.batch_invariant_mode" in attention
    assert 'os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")) != 0' in attention


def test_transformer_engines_attention_takes_the_scale_of_yarn():
    """Otherwise it is lost on CUDA (rlmath/actor/rotary.py)."""
    attention = function(f"{CORE}.extensions.transformer_engine", "TEDotProductAttention")
    assert 'extra_kwargs["softmax_scale"] = softmax_scale' in attention


def test_router_products_take_a_type_and_no_workspace():
    """Transformer Engine before 2.8 had a workspace in the place of the type."""
    text = function(f"{CORE}.transformer.moe.moe_utils", "RouterGatingLinearFunction")
    assert 'te_general_gemm(weight, inp, router_dtype, layout="TN", bias=bias)' in text


def test_fused_adam_is_transformer_engines():
    text = source(f"{CORE}.optimizer")
    assert "from transformer_engine.pytorch.optimizers import FusedAdam as Adam" in text


def test_one_table_of_rotary_angles_is_kept(monkeypatch):
    """Every micro-batch has another longest sequence; Megatron keeps 32 tables."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert "lru_cache" in inspect.getsource(RotaryEmbedding.forward.__wrapped__)
    monkeypatch.setattr(  # Its own takes the angles to the GPU.
        RotaryEmbedding, "get_emb", lambda self, n, _: torch.arange(n)[:, None] * self.inv_freq
    )
    made = [RotaryEmbedding(8, 1.0, use_cpu_initialization=True) for _ in range(2)]
    keep_one_rotary_table(made[1])
    before = RotaryEmbedding.forward.cache_info().currsize
    tables = [made[1](length, packed_seq=True, cp_group=None) for length in (4, 8, 8, 4)]
    assert tables[1] is tables[2] and tables[0] is not tables[3]
    assert RotaryEmbedding.forward.cache_info().currsize == before
    for length, table in zip((4, 8), tables[:2], strict=True):
        assert torch.equal(table, made[0](length, packed_seq=True))


def test_names_of_transformer_engines_layers_in_a_checkpoint():
    """Names left out of a checkpoint (rlmath/checkpoint/model_state.py), and of norms where
    Megatron's own layers save them (rlmath/actor/layers.py)."""
    experts = function(f"{CORE}.extensions.transformer_engine", "TEGroupedLinear")
    assert "f\"{prefix}_extra_state{'' if gemm_idx == 0 else gemm_idx}\"" in experts
    # Result of a load without extra state.
    assert (
        'fp8_checkpoint = any("_extra_state" in str(key) for key in state_dict.keys())' in experts
    )
    layers = source(f"{CORE}.models.gpt.gpt_layer_specs")
    assert "pre_mlp_layernorm=backend.layer_norm() if num_experts else IdentityOp" in layers
    assert '"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"' in layers


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_no_gloo_group_is_made_beside_megatrons_own(monkeypatch, backend):
    """Each of them costs every process a thread and a rendezvous, and nothing uses them: optimizer
    and checkpoints are built without (``use_gloo_process_groups=False``, a separate group)."""
    from megatron.core import parallel_state, tensor_parallel

    given = {}
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **k: given.update(k))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(parallel, "background_group", lambda: None)
    platform = Platform("cuda", backend, "local")
    parallel.initialize(Layout(2, 1, 4), platform, 1, "127.0.0.1", 1, seed=0)
    assert given["create_gloo_process_groups"] is False


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("warmup", "decay"), [(0, 7), (3, 7), (5, 2)])
def test_scheduled_rate_is_megatrons(schedule, warmup, decay):
    settings = OptimizerConfig(
        lr=3e-4, min_lr=1e-5, schedule=schedule, warmup_steps=warmup, decay_steps=decay
    )
    group = {"lr": 0.0, "weight_decay": 0.0}
    scheduler = build_scheduler(SimpleNamespace(param_groups=[group]), settings)
    for taken in range(12):
        assert group["lr"] == pytest.approx(scheduled_rate(settings, taken), rel=1e-12, abs=1e-18)
        scheduler.step(1)


pytestmark = pytest.mark.filterwarnings("ignore")


def test_without_transformer_engine_fp8_is_no_error_and_nothing():
    """Reason that actor.fp8 refuses Megatron's own layers (rlmath/actor/fp8.py)."""
    from megatron.core import fp8_utils

    assert not fp8_utils.HAVE_TE
    wanted = SimpleNamespace(fp8="e4m3", fp8_recipe="blockwise")
    assert fp8_utils.get_fp8_recipe(wanted) is None, "actor.fp8 may be had with local layers"
    with fp8_utils.get_fp8_context(wanted) as context:
        assert context is None


def test_recomputed_norms_always_ask_for_fp8():
    from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

    assert not HAVE_TE
    assert CheckpointWithoutOutput(fp8=False).fp8, "layernorm may be recomputed without TE"
