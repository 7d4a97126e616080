"""What the actor relies on in the installed Megatron-core, and what breaks when it changes."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from rlmath.actor.fusions import fusion_settings
from rlmath.actor.rotary import keep_one_rotary_table
from tests.contracts.contract import Row, check, parametrized

CORE = "megatron.core"
CONFIG = f"{CORE}.transformer.transformer_config:TransformerConfig"
KERNELS = f"{CORE}.transformer.custom_layers.batch_invariant_kernels"

ROWS = [
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "the head need not give zeros (rlmath/actor/head.py, actor.overlap_gradients)",
        says=("param.grad is not None", "when overlap_grad_reduce is True"),
    ),
    Row(
        CONFIG,
        fields=("pipeline_model_parallel_layout", "softmax_scale"),
        breaks="stages share layers otherwise than the weight tables say, or yarn's scale of "
        "attention is lost (rlmath/actor/model.py)",
    ),
    Row(
        f"{CORE}.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        # The call without mscale.
        says=("t, cu_seqlens, freqs, cp_size=cp_group.size(), cp_rank=cp_group.rank()",),
        breaks="packed rope may take yarn's scale, and softmax_scale need not "
        "(rlmath/actor/rotary.py)",
    ),
    Row(
        f"{CORE}.transformer.moe.moe_utils:topk_routing_with_score_function",
        says=(
            "scores_for_routing = scores + expert_bias",
            "probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if topk > 1 else scores",
        ),
        breaks="GLM's router is another one (rlmath/actor/experts.py)",
    ),
    Row(
        f"{CORE}.transformer.moe.moe_utils:topk_routing_with_score_function",
        takes=("logits", "topk", "router_replay"),
        says=(
            "router_replay.get_replay_topk(\n                scores, topk, num_groups, group_topk, "
            "_compute_topk",
            "if fused:",
        ),
        breaks="routes are not replayed (rlmath/actor/routing_replay.py); a fused choice never "
        "asks the recorder (moe_router_fusion stays off)",
    ),
    Row(
        f"{CORE}.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.__init__",
        says=(
            "virtual_pipeline_model_parallel_size = len(layout) // pipeline_model_parallel_size",
            "layout[vpp_rank * pipeline_model_parallel_size + pp_rank]",
        ),
        breaks="virtual stages have other layers than Layout.stage_chunks says",
    ),
    Row(
        f"{CORE}.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        says=(
            "expected each model chunk to have a data iterator",
            "if isinstance(no_sync_func, list):",
            "num_microbatches % config.microbatch_group_size_per_vp_stage",
        ),
        breaks="actor.virtual_stages (rlmath/actor/schedule.py, rlmath/actor/optimizer.py)",
    ),
    Row(
        f"{CORE}.pipeline_parallel.schedules:get_pp_rank_microbatches",
        says=(
            "(pipeline_parallel_size - pipeline_parallel_rank - 1) * 2",
            "(num_model_chunks - 1) * microbatch_group_size_per_vp_stage",
        ),
        breaks="the plan counts other micro-batches in flight (rlmath/commands/plan/memory.py)",
    ),
    Row(
        f"{CORE}.pipeline_parallel.p2p_communication:_p2p_ops",
        says=("if group.size() == 2", "group.rank() % 2 == 0"),
        breaks="two stages take an activation for a gradient (rlmath/actor/model.py)",
    ),
    Row(
        f"{CORE}.transformer.moe.router:TopKRouter",
        has=("router_replay", "layer_number"),
        breaks="a router does not take the recorder (rlmath/actor/routing_replay.py)",
    ),
    Row(
        f"{CORE}.transformer.moe.router:TopKRouter.routing",
        says=("router_replay=self.router_replay",),
        breaks="a router does not ask the recorder (rlmath/actor/routing_replay.py)",
    ),
    Row(
        f"{CORE}.transformer.moe.router_replay:RouterReplay",
        has=("target_topk_idx", "router_replay_action", "global_router_replay_instances"),
        breaks="rlmath/actor/routing_replay.py",
    ),
    Row(
        f"{CORE}.transformer.moe.router_replay:RouterReplay.get_replay_topk",
        passes=("scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
        says=(
            "top_indices = self.target_topk_idx",
            "probs = scores.gather(1, top_indices)",
            "scores, topk, num_groups=num_groups, group_topk=group_topk",
        ),
        breaks="what is replayed is not what was recorded (rlmath/actor/routing_replay.py)",
    ),
    Row(
        f"{CORE}.distributed.finalize_model_grads:_update_router_expert_bias",
        says=("config.moe_router_bias_update_rate",),
        breaks="the bias that chooses experts may move (rlmath/actor/experts.py)",
    ),
    Row(
        CONFIG,
        fields=(
            *fusion_settings(True),
            "batch_invariant_mode",
            "deterministic_mode",
            "attention_backend",
            "calculate_per_token_loss",
            "variable_seq_lengths",
        ),
        breaks="the model cannot be built as rlmath/actor/model.py describes it",
    ),
    Row(
        f"{CONFIG}.__post_init__",
        says=(
            "fused_apply_rotary_pos_emb_thd is None",
            "self.attention_backend == AttnBackend.flash",
        ),
        breaks="rope fusion or batch invariance is accepted where it cannot work",
    ),
    Row(
        f"{CORE}.tensor_parallel.layers:ColumnParallelLinear.__init__",
        says=(
            "if config.gradient_accumulation_fusion and not _grad_accum_fusion_available",
            "raise RuntimeError",
        ),
        breaks="the output layer may take gradient_accumulation_fusion without APEX; then the flag "
        "could be set for all layers (rlmath/actor/fusions.py)",
    ),
    Row(
        f"{CORE}.tensor_parallel.layers:ColumnParallelLinear",
        has=("_forward_impl", "gradient_accumulation_fusion"),
        breaks="precision.lm_head_dtype=float32 has nothing to wrap (rlmath/actor/model.py)",
    ),
    Row(
        f"{CORE}.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
        says=('os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"',),
        breaks="tensor-parallel overlap may want another number of hardware queues "
        "(rlmath/device/environment.py)",
    ),
    Row(
        f"{CORE}.distributed.distributed_data_parallel:"
        "DistributedDataParallel._make_backward_post_hook",
        says=("not param.grad_added_to_main_grad", "param.main_grad.add_(param.grad.data)"),
        breaks="gradients that Transformer Engine has added to main_grad are added again",
    ),
    Row(
        f"{CORE}.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        says=("grad_added_to_main_grad = False",),
        breaks="after the first optimizer step no gradient of a Transformer Engine layer counts",
    ),
    Row(
        f"{CORE}.pipeline_parallel.schedules:forward_step",
        says=("model.set_is_first_microbatch()",),
        breaks="Transformer Engine adds a step's first gradient to what is left of the last",
    ),
    Row(
        f"{CORE}.models.common.language_module.language_module:"
        "LanguageModule._set_attention_backend",
        says=('check_and_set_env_variable("NVTE_FUSED_ATTN", 0, AttnBackend.flash)',),
        breaks="under batch invariance Transformer Engine may take an attention that is not",
    ),
    Row(
        f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
        takes=("qk_layernorm",),
        says=("linear_qkv=backend.column_parallel_layer_norm_linear()",),
        breaks="Transformer Engine's layers are built otherwise (rlmath/actor/layers.py)",
    ),
    Row(
        f"{CORE}.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
        takes=("config", "use_transformer_engine", "normalization"),
        breaks="MoE layers cannot be built (rlmath/actor/experts.py)",
    ),
]


@parametrized(ROWS)
def test_megatron(row):
    check(row)


def source(module):
    """Of a module that imports only with CUDA or Transformer Engine."""
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
    "layer",
    ["TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear"],
)
def test_the_extension_reads_the_fusion_flag_once(layer):
    """It hands the flag to Transformer Engine's constructor, whose attribute the forward pass
    reads: ``accumulate_into_main_grads`` sets that later, when Megatron's buffers are there."""
    text = function(f"{CORE}.extensions.transformer_engine", layer)
    assert text.count("gradient_accumulation_fusion") == 1
    assert "fuse_wgrad_accumulation=self.config.gradient_accumulation_fusion" in text


def test_batch_invariant_products_overwrite_where_they_should_add():
    """Why weight gradients are not fused under batch invariance. When Megatron reads ``accumulate``
    this fails, and ``accumulate_into_main_grads`` need make no exception."""
    text = function(KERNELS, "_te_general_gemm_patched") + function(
        KERNELS, "_extract_te_gemm_args"
    )
    assert "out.copy_(result)" in text and "accumulate" not in text


def test_what_batch_invariance_replaces():
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
    """What is left out of it (rlmath/checkpoint/model_state.py), and how norms are called where
    Megatron's own layers save it (rlmath/actor/layers.py)."""
    experts = function(f"{CORE}.extensions.transformer_engine", "TEGroupedLinear")
    assert "f\"{prefix}_extra_state{'' if gemm_idx == 0 else gemm_idx}\"" in experts
    # What a load without extra state meets.
    assert (
        'fp8_checkpoint = any("_extra_state" in str(key) for key in state_dict.keys())' in experts
    )
    layers = source(f"{CORE}.models.gpt.gpt_layer_specs")
    assert "pre_mlp_layernorm=backend.layer_norm() if num_experts else IdentityOp" in layers
    assert '"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"' in layers
